"""The gated unit of gpt-oss (OpenAI, 2025): gate and up are clamped, and up is moved by one."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor


@dataclass(frozen=True)
class ClampedGLU:
    """The scalars of such a unit, by config.json's names.

    Attributes:
        swiglu_limit: The largest gate, and the largest magnitude of up.
        swiglu_alpha: The factor of the gate within the sigmoid.
    """

    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702


def clamped_glu(g: Graph, gate: Tensor, up: Tensor, scalars: ClampedGLU) -> Tensor:
    """Computes y = (clamp(up, -limit, limit) + 1) · x · σ(alpha · x) with x = min(gate, limit).

    Args:
        g: The graph.
        gate: (rows, columns) operand.
        up: Like gate.
        scalars: limit and alpha.

    Returns:
        (rows, columns) operand.

    Raises:
        GraphError: If the shapes do not fit.
    """
    if gate.shape != up.shape:
        raise GraphError(f"clamped_glu: {gate} and {up} differ")
    units = gate.rows * gate.units(8)
    params = {"units": units, "alpha": scalars.swiglu_alpha, "limit": scalars.swiglu_limit}

    def made() -> Tensor:
        y = g.operand("glu", gate.rows, gate.columns)
        tensors = {"gate": gate, "up": up, "y": y}
        g.launch("clamped_glu/forward.wgsl", units, tensors, params)
        return y

    y = made()

    def vjp(dy: Tensor) -> None:
        dgate = g.operand(f"d {gate.name}", gate.rows, gate.columns)
        dup = g.operand(f"d {up.name}", up.rows, up.columns)
        tensors = {"dy": dy, "gate": gate, "up": up, "dgate": dgate, "dup": dup}
        g.launch("clamped_glu/backward.wgsl", units, tensors, params)
        g.add_gradient(gate, dgate)
        g.add_gradient(up, dup)

    g.record(y, [gate, up], vjp, remake=made)
    return y
