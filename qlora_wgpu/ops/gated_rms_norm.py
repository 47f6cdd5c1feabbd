"""RMSNorm of every head by itself, times a gate, as Gated DeltaNet has it on its output."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.activation import ACTIVATIONS

_SILU = ACTIVATIONS["silu"]


def gated_rms_norm(g: Graph, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes y = x / √(mean(x²) + eps) · weight · silu(z) over each head.

    In float32 throughout: transformers rounds the norm to the operands' type before the gate.

    Args:
        g: The graph.
        x: (rows, heads · head_dim) operand.
        z: Like x, the gate.
        weight: (head_dim) float32, frozen; head_dim is a multiple of 8.
        eps: Keeps the root from zero.

    Returns:
        (rows, heads · head_dim) operand.

    Raises:
        GraphError: If the shapes do not fit.
    """
    head_dim = weight.columns
    if head_dim % 8 or x.columns % head_dim or x.shape != z.shape:
        raise GraphError(f"gated_rms_norm: {x} and {z} have no heads of {weight}")
    heads = x.rows * x.columns // head_dim
    params: dict[str, int | float] = {"heads": heads, "units": head_dim // 8, "eps": eps}
    inputs = {"x": x, "z": z, "weight": weight}

    def made() -> Tensor:
        y = g.operand(f"norm({x.name})", x.rows, x.columns)
        g.launch("gated_rms_norm/forward.wgsl", heads, {**inputs, "y": y}, params, _SILU)
        return y

    y = made()

    def vjp(dy: Tensor) -> None:
        dx, dz = g.gradient_for(x), g.gradient_for(z)
        tensors = {**inputs, "dy": dy, "dx": dx, "dz": dz}
        g.launch("gated_rms_norm/backward.wgsl", heads, tensors, params, _SILU)
        g.add_gradient(x, dx)
        g.add_gradient(z, dz)

    g.record(y, [x, z], vjp, remake=made)
    return y
