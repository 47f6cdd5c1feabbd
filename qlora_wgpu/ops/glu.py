"""Gated linear units (Shazeer, 2020): SwiGLU and GeGLU."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.activation import ACTIVATIONS
from qlora_wgpu.ops.image import as_buffer


def glu(g: Graph, gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """Computes y = activation(gate) · up.

    Args:
        g: The graph.
        gate: (rows, columns) operand.
        up: Like gate.
        activation: Hugging Face's name, a key of ``ACTIVATIONS``.

    Returns:
        (rows, columns) operand.
    """
    if (gate.rows, gate.columns) != (up.rows, up.columns):
        raise GraphError(f"glu: {gate} and {up} differ")
    y = g.operand("glu", gate.rows, gate.columns, image=True)
    units = gate.rows * gate.units(8)
    constants = {"BF16": g.bf16, "IMAGE": y.image, **ACTIVATIONS[activation]}
    gate_buffer, up_buffer = as_buffer(g, gate), as_buffer(g, up)
    g.launch(
        "glu/forward.wgsl",
        units,
        {"gate": gate_buffer, "up": up_buffer, "y": y},
        {"units": units},
        constants,
    )

    def vjp(dy: Tensor) -> None:
        given = as_buffer(g, dy)
        dgate = g.operand(f"d {gate.name}", gate.rows, gate.columns, image=True)
        dup = g.operand(f"d {up.name}", up.rows, up.columns, image=True)
        g.launch(
            "glu/backward.wgsl",
            units,
            {"dy": given, "gate": gate_buffer, "up": up_buffer, "dgate": dgate, "dup": dup},
            {"units": units},
            {**constants, "DY_BF16": given.dtype == "bfloat16"},
        )
        g.hand_over(gate, dgate)
        g.hand_over(up, dup)

    g.record(y, [gate, up], vjp)
    return y
