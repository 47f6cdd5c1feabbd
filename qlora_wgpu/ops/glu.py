"""Gated linear units (Shazeer, 2020): SwiGLU and GeGLU, and gates that are sigmoids."""

from __future__ import annotations

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.activation import ACTIVATIONS, SIGMOID
from qlora_wgpu.ops.product_glu import product_and_glu


def glu(g: Graph, gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """Computes y = activation(gate) · up.

    Args:
        g: The graph.
        gate: (rows, columns) operand.
        up: Like gate.
        activation: Hugging Face's name, a key of ``ACTIVATIONS``.

    Returns:
        (rows, columns) operand.

    Raises:
        GraphError: If the shapes do not fit.
    """
    return _gated(g, gate, up, ACTIVATIONS[activation])


def sigmoid_gate(g: Graph, x: Tensor, gate: Tensor) -> Tensor:
    """Computes y = sigmoid(gate) · x, as Qwen3-Next has it on what its attention makes.

    Args:
        g: The graph.
        x: (rows, columns) operand.
        gate: Like x.

    Returns:
        (rows, columns) operand.

    Raises:
        GraphError: If the shapes do not fit.
    """
    return _gated(g, gate, x, SIGMOID)


def _gated(g: Graph, gate: Tensor, up: Tensor, constants: dict[str, Constant]) -> Tensor:
    if gate.shape != up.shape:
        raise GraphError(f"glu: {gate} and {up} differ")
    together = product_and_glu(g, gate, up, constants)
    if together is not None:
        return together
    units = gate.rows * gate.units(8)

    def made() -> Tensor:
        y = g.operand("glu", gate.rows, gate.columns)
        tensors = {"gate": gate, "up": up, "y": y}
        g.launch("glu/forward.wgsl", units, tensors, {"units": units}, constants)
        return y

    y = made()

    def vjp(dy: Tensor) -> None:
        dgate = g.operand(f"d {gate.name}", gate.rows, gate.columns)
        dup = g.operand(f"d {up.name}", up.rows, up.columns)
        tensors = {"dy": dy, "gate": gate, "up": up, "dgate": dgate, "dup": dup}
        g.launch("glu/backward.wgsl", units, tensors, {"units": units}, constants)
        g.add_gradient(gate, dgate)
        g.add_gradient(up, dup)

    g.record(y, [gate, up], vjp, remake=made)
    return y
