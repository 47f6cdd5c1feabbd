"""Columns of a matrix by themselves, for layers that compute several things at once."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor


def columns(g: Graph, x: Tensor, first: int, count: int) -> Tensor:
    """Takes x[:, first : first + count].

    Args:
        g: The graph.
        x: (rows, columns) of any type.
        first: The first column.
        count: How many.

    Returns:
        (rows, count) operand.

    Raises:
        GraphError: If x has no such columns.
    """
    if first < 0 or count < 1 or first + count > x.columns:
        raise GraphError(f"columns: {x} has no columns {first} to {first + count}")
    y = g.operand(f"{x.name}[{first}:]", x.rows, count)
    params = {
        "rows": x.rows,
        "first": first,
        "columns": count,
        "x_stride": x.stride,
        "y_stride": y.stride,
    }
    g.launch("columns/forward.wgsl", x.rows * y.units(8), {"x": x, "y": y}, params)

    def vjp(dy: Tensor) -> None:
        dx = g.float32(f"d {x.name}", x.rows, x.columns)
        constants = {"ACCUMULATE": False}
        g.launch(
            "columns/backward.wgsl", x.rows * dx.units(4), {"dy": dy, "dx": dx}, params, constants
        )
        g.add_gradient(x, dx)

    g.record(y, [x], vjp)
    return y
