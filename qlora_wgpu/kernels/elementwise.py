"""Kernels over elements that other kernels need."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor

_SUM_PARTS = "tensor/sum_parts.wgsl"


def sum_parts(
    g: Graph,
    x: Tensor,
    y: Tensor,
    parts: int,
    *,
    accumulate: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    column0: int = 0,
) -> None:
    """Adds up the parts of x, which lie one below the other, into columns of y.

    Args:
        g: The graph.
        x: (parts · rows, columns) float32.
        y: (rows, ·), written from ``column0`` on.
        parts: How many there are.
        accumulate: Whether to add to y.
        bias: The bias of all of y's columns to add, float32.
        residual: What to add, of y's layout.
        column0: A multiple of eight.

    Raises:
        GraphError: If the shapes do not fit.
    """
    if x.rows != parts * y.rows or column0 + x.columns > y.columns or column0 % 8:
        raise GraphError(f"sum: {x} is not {parts} times columns of {y} from {column0} on")
    units = y.rows * x.units(4)
    g.launch(
        _SUM_PARTS,
        units,
        {"x": x, "y": y, "bias": bias, "residual": residual},
        {
            "units": units,
            "parts": parts,
            "columns": x.columns,
            "x_stride": x.units(4),
            "y_stride": y.units(4),
            "y_unit0": column0 // 4,
        },
        {"ACCUMULATE": accumulate},
    )
