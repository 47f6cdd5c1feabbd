"""Columns of a matrix by themselves, for layers that compute several things at once."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.image import as_buffer
from qlora_wgpu.ops.tensor import fill_zero


def columns(g: Graph, x: Tensor, first: int, count: int) -> Tensor:
    """Takes x[:, first : first + count].

    Args:
        g: The graph.
        x: (rows, columns) operand.
        first: The first column.
        count: How many.

    Returns:
        (rows, count) operand.
    """
    if first + count > x.columns:
        raise GraphError(f"columns: {x} has no columns {first} to {first + count}")
    y = g.operand(f"{x.name}[{first}:]", x.rows, count)
    params: dict[str, int | float] = {
        "rows": x.rows,
        "first": first,
        "columns": count,
        "x_stride": x.stride,
        "y_stride": y.stride,
    }
    g.launch(
        "columns/forward.wgsl",
        x.rows * y.units(2),
        {"x": as_buffer(g, x), "y": y},
        params,
        {"BF16": g.bf16},
    )

    def vjp(dy: Tensor) -> None:
        dx, accumulate = g.gradient_into(x)
        if not accumulate:
            fill_zero(g, dx)
        g.launch(
            "columns/backward.wgsl",
            x.rows * count,
            {"dy": as_buffer(g, dy), "dx": dx},
            params,
            {"BF16": dy.dtype == "bfloat16"},
        )

    g.record(y, [x], vjp)
    return y
