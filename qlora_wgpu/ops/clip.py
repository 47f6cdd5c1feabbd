"""Elements kept within bounds."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor


def clip(g: Graph, x: Tensor, limit: float) -> Tensor:
    """Computes y = clamp(x, -limit, limit), whose gradient is zero beyond the limit.

    Args:
        g: The graph.
        x: (rows, columns) operand.
        limit: The largest magnitude, positive.

    Returns:
        (rows, columns) operand.
    """
    units = x.rows * x.units(8)
    params = {"units": units, "limit": limit}

    def made() -> Tensor:
        y = g.operand("clipped", x.rows, x.columns)
        g.launch("clip/forward.wgsl", units, {"x": x, "y": y}, params)
        return y

    y = made()

    def vjp(dy: Tensor) -> None:
        dx = g.operand(f"d {x.name}", x.rows, x.columns)
        g.launch("clip/backward.wgsl", units, {"dy": dy, "x": x, "dx": dx}, params)
        g.add_gradient(x, dx)

    g.record(y, [x], vjp, remake=made)
    return y
