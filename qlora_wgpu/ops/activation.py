"""Activation functions, by Hugging Face's names."""

from __future__ import annotations

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor

_PLAIN: dict[str, Constant] = {
    "SILU": False,
    "ERF": False,
    "RELU": False,
    "SQUARED_RELU": False,
    "SIGMOID": False,
    "QUICK_GELU": False,
}
SIGMOID: dict[str, Constant] = {**_PLAIN, "SIGMOID": True}
"""What gates pass through, which no MLP has for its activation."""
ACTIVATIONS: dict[str, dict[str, Constant]] = {
    "silu": {**_PLAIN, "SILU": True},
    "swish": {**_PLAIN, "SILU": True},
    "gelu_pytorch_tanh": _PLAIN,
    "gelu_new": _PLAIN,
    "gelu_fast": _PLAIN,
    "gelu": {**_PLAIN, "ERF": True},
    "quick_gelu": {**_PLAIN, "QUICK_GELU": True},
    "relu": {**_PLAIN, "RELU": True},
    "relu2": {**_PLAIN, "SQUARED_RELU": True},
}


def activation(g: Graph, x: Tensor, name: str) -> Tensor:
    """Computes y = name(x).

    Args:
        g: The graph.
        x: (rows, columns) operand.
        name: A key of ``ACTIVATIONS``.

    Returns:
        (rows, columns) operand.
    """
    units, constants = x.rows * x.units(8), ACTIVATIONS[name]

    def made() -> Tensor:
        y = g.operand(name, x.rows, x.columns)
        g.launch("activation/forward.wgsl", units, {"x": x, "y": y}, {"units": units}, constants)
        return y

    y = made()

    def vjp(dy: Tensor) -> None:
        dx = g.operand(f"d {x.name}", x.rows, x.columns)
        tensors = {"dy": dy, "x": x, "dx": dx}
        g.launch("activation/backward.wgsl", units, tensors, {"units": units}, constants)
        g.add_gradient(x, dx)

    g.record(y, [x], vjp, remake=made)
    return y
