"""Activation functions, by Hugging Face's names."""

from __future__ import annotations

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.image import as_buffer

ACTIVATIONS: dict[str, dict[str, Constant]] = {
    "silu": {"SILU": True, "ERF": False},
    "swish": {"SILU": True, "ERF": False},
    "gelu_pytorch_tanh": {"SILU": False, "ERF": False},
    "gelu_new": {"SILU": False, "ERF": False},
    "gelu": {"SILU": False, "ERF": True},
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
    y = g.operand(name, x.rows, x.columns, image=True)
    units = x.rows * x.units(8)
    constants = {"BF16": g.bf16, "IMAGE": y.image, **ACTIVATIONS[name]}
    x_buffer = as_buffer(g, x)
    tensors = {"x": x_buffer, "y": y}
    g.launch("activation/forward.wgsl", units, tensors, {"units": units}, constants)

    def vjp(dy: Tensor) -> None:
        dx = g.operand(f"d {x.name}", x.rows, x.columns, image=True)
        given = as_buffer(g, dy)
        tensors = {"dy": given, "x": x_buffer, "dx": dx}
        flags = {**constants, "DY_BF16": given.dtype == "bfloat16"}
        g.launch("activation/backward.wgsl", units, tensors, {"units": units}, flags)
        g.hand_over(x, dx)

    g.record(y, [x], vjp)
    return y
