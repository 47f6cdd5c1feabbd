"""Splitting and joining columns of matrices, for fused layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor


def columns(g: Graph, x: Tensor, first: int, count: int) -> Tensor:
    """x[:, first : first + count], an operand; x of any type."""
    if first < 0 or count < 1 or first + count > x.columns:
        raise GraphError(f"columns: {x} has no columns {first} to {first + count}")
    y = g.operand(f"{x.name}[{first}:]", x.rows, count)
    return _taken(g, "columns", x, y, {"first": first, "columns": count})


def _taken(g: Graph, kernel: str, x: Tensor, y: Tensor, params: dict[str, int]) -> Tensor:
    g.launch(f"{kernel}/forward.wgsl", x.rows * y.units(8), {"x": x, "y": y}, params)

    def vjp(dy: Tensor) -> None:
        dx = g.float32(f"d {x.name}", x.rows, x.columns)
        tensors, units = {"dy": dy, "dx": dx}, x.rows * dx.units(4)
        g.launch(f"{kernel}/backward.wgsl", units, tensors, params, {"ACCUMULATE": False})
        g.add_gradient(x, dx)

    g.record(y, [x], vjp)
    return y


def column_scale(g: Graph, x: Tensor, factors: Tensor) -> Tensor:
    """x times a factor of each column, an operand; factors (columns) float32, frozen."""
    if factors.columns != x.columns:
        raise GraphError(f"column_scale: {x} and {factors} do not fit")
    units = x.rows * x.units(8)

    def scaled(given: Tensor, into: Tensor) -> None:
        tensors = {"x": given, "factors": factors, "y": into}
        g.launch("column_scale/scale.wgsl", units, tensors, {"units": units})

    y = g.operand(f"scaled {x.name}", x.rows, x.columns)
    scaled(x, y)

    def vjp(dy: Tensor) -> None:
        dx = g.new_gradient(x)
        scaled(dy, dx)
        g.add_gradient(x, dx)

    g.record(y, [x], vjp)
    return y


_MOST = 3  # parts of a group per launch


def group_columns(
    g: Graph,
    x: Tensor,
    groups: int,
    group: int,
    first: int,
    widths: Sequence[int],
    *,
    float32: bool = False,
) -> Tensor:
    """Takes neighbouring parts of every group of columns, and joins equal parts.

    With x as (rows, groups, group), the result has the first part of all groups, x[:, :, first :
    first + widths[0]], then the next part of all, and so on: (rows, groups · sum of widths), an
    operand or float32, for one, two or three widths.
    """
    count = sum(widths)
    few = 1 <= len(widths) <= _MOST and all(width > 0 for width in widths)
    if not few or first < 0 or first + count > group or groups * group != x.columns:
        raise GraphError(
            f"group_columns: {x} has no parts {list(widths)} from column {first} of each of "
            f"{groups} groups of {group}"
        )
    make = g.float32 if float32 else g.operand
    y = make(f"{x.name}[{first}:]", x.rows, groups * count)
    sizes = [*widths, *[0] * (_MOST - len(widths))]
    params = {f"width{i}": size for i, size in enumerate(sizes)}
    params |= {"groups": groups, "group": group, "first": first}
    return _taken(g, "group_columns", x, y, params)


@dataclass(frozen=True)
class HeadPart:
    """Some columns of every head, and their source.

    In DeepSeek-V2 (2024, section 2.1), a head's query and key have a rotated part, which all keys
    of a token share, and one without rotation; values may be shorter than both.
    """

    x: Tensor  # (rows, columns) of any type
    group: int  # columns of x per head; 0 if all heads share them
    first: int  # the first column taken of each
    width: int  # number of columns taken

    def fits(self, heads: int) -> bool:
        room = self.group or self.x.columns
        own = self.group * heads == self.x.columns if self.group else True
        return own and self.first >= 0 and self.width > 0 and self.first + self.width <= room


def head_parts(
    g: Graph, parts: Sequence[HeadPart], heads: int, head_dim: int, *, float32: bool = False
) -> Tensor:
    """Heads composed of one or two parts, padded with zeros.

    Returns an operand or float32 (rows, heads · head_dim).
    """
    width = sum(part.width for part in parts)
    whole = all(part.fits(heads) and part.x.rows == parts[0].x.rows for part in parts)
    if not 1 <= len(parts) <= 2 or not whole or width > head_dim:
        raise GraphError(f"head_parts: {list(parts)} do not fit {heads} heads of {head_dim}")
    rows = parts[0].x.rows
    make = g.float32 if float32 else g.operand
    y = make(f"heads of {parts[0].x.name}", rows, heads * head_dim)
    params, tensors = {"rows": rows, "head_dim": head_dim}, dict[str, Tensor | None](y=y)
    for i, part in enumerate((*parts, None)[:2]):
        tensors[f"x{i}"] = part.x if part else None
        params |= {
            f"x{i}_stride": part.x.stride if part else 0,
            f"group{i}": part.group if part else 0,
            f"first{i}": part.first if part else 0,
            f"width{i}": part.width if part else 0,
        }
    g.launch("head_parts/forward.wgsl", rows * y.units(8), tensors, params)

    def vjp(dy: Tensor) -> None:
        at = 0
        for part in parts:
            if part.x.requires_grad:
                _head_part_backward(g, dy, part, heads, head_dim, at)
            at += part.width

    g.record(y, [part.x for part in parts], vjp)
    return y


def _head_part_backward(
    g: Graph, dy: Tensor, part: HeadPart, heads: int, head_dim: int, at: int
) -> None:
    x = part.x
    dx = g.float32(f"d {x.name}", x.rows, x.columns)
    params = {
        "heads": heads,
        "head_dim": head_dim,
        "group": part.group,
        "first": part.first,
        "width": part.width,
        "at": at,
    }
    g.launch(
        "head_parts/backward.wgsl",
        x.rows * dx.units(4),
        {"dy": dy, "dx": dx},
        params,
        {"SHARED": not part.group, "ACCUMULATE": False},
    )
    g.add_gradient(x, dx)
