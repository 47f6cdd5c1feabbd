"""Kernels over elements that other kernels need."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor


def sum_parts(g: Graph, x: Tensor, y: Tensor, parts: int, *, accumulate: bool = False) -> None:
    """Adds up the parts of x, which lie one below the other, into y; all float32."""
    if (x.rows, x.stride, x.dtype) != (parts * y.rows, y.stride, y.dtype):
        raise GraphError(f"sum: {x} is not {parts} times {y}")
    units = y.rows * y.units(4)
    g.launch(
        "tensor/sum_parts.wgsl",
        units,
        {"x": x, "y": y},
        {"units": units, "parts": parts},
        {"ACCUMULATE": accumulate},
    )
