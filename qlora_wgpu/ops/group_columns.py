"""Columns of a matrix whose columns are groups, one for each head: layers that compute several."""

from __future__ import annotations

from collections.abc import Sequence

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor

_MOST = 3  # parts that a launch takes


def group_columns(
    g: Graph, x: Tensor, groups: int, group: int, first: int, widths: Sequence[int]
) -> Tensor:
    """Takes neighbouring parts of every group of columns, and puts like parts together.

    With x as (rows, groups, group), the first part of all groups, x[:, :, first : first +
    widths[0]], comes before what follows it in each, and so on.

    Args:
        g: The graph.
        x: (rows, groups · group) of any type.
        groups: How many there are.
        group: Columns of each.
        first: The first column that is taken of each.
        widths: Columns of one, two or three parts of each.

    Returns:
        (rows, groups · sum of widths) operand.

    Raises:
        GraphError: If x has no such columns.
    """
    count = sum(widths)
    few = 1 <= len(widths) <= _MOST and all(width > 0 for width in widths)
    if not few or first < 0 or first + count > group or groups * group != x.columns:
        raise GraphError(
            f"group_columns: {x} has no parts {list(widths)} from column {first} of each of "
            f"{groups} groups of {group}"
        )
    y = g.operand(f"{x.name}[{first}:]", x.rows, groups * count)
    sizes = [*widths, *[0] * (_MOST - len(widths))]
    params = {
        "rows": x.rows,
        "columns": y.columns,
        "groups": groups,
        "group": group,
        "first": first,
        **{f"width{i}": size for i, size in enumerate(sizes)},
        "x_stride": x.stride,
        "y_stride": y.stride,
    }
    g.launch("group_columns/forward.wgsl", x.rows * y.units(8), {"x": x, "y": y}, params)

    def vjp(dy: Tensor) -> None:
        dx = g.float32(f"d {x.name}", x.rows, x.columns)
        tensors, units = {"dy": dy, "dx": dx}, x.rows * dx.units(4)
        constants = {"ACCUMULATE": False}
        g.launch("group_columns/backward.wgsl", units, tensors, params, constants)
        g.add_gradient(x, dx)

    g.record(y, [x], vjp)
    return y
