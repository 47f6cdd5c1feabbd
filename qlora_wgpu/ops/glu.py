"""Gated linear units (Shazeer, 2020): SwiGLU and GeGLU."""

from __future__ import annotations

from qlora_wgpu.gpu.device import fold_workgroups
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, ceil_div
from qlora_wgpu.graph.tensor import Tensor

ACTIVATIONS = {"silu": True, "gelu_pytorch_tanh": False}


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
    y = g.operand("glu", gate.rows, gate.columns)
    units = gate.rows * gate.units(4)
    groups = fold_workgroups(ceil_div(units, 64))
    constants: dict[str, Constant] = {"BF16": g.bf16, "SILU": ACTIVATIONS[activation]}
    g.launch(
        "glu/forward.wgsl", groups, {"gate": gate, "up": up, "y": y}, {"units": units}, constants
    )

    def vjp(dy: Tensor) -> None:
        dgate = g.operand(f"d {gate.name}", gate.rows, gate.columns)
        dup = g.operand(f"d {up.name}", up.rows, up.columns)
        g.launch(
            "glu/backward.wgsl",
            groups,
            {"dy": dy, "gate": gate, "up": up, "dgate": dgate, "dup": dup},
            {"units": units},
            constants,
        )
        g.hand_over(gate, dgate)
        g.hand_over(up, dup)

    g.record(y, [gate, up], vjp)
    return y
