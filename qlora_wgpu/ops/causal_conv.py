"""The short convolution of Gated DeltaNet and Mamba: depthwise, causal, through SiLU."""

from __future__ import annotations

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.pointwise import ACTIVATIONS
from qlora_wgpu.ops.short_conv import convolve

_CONSTANTS: dict[str, Constant] = {"GATED": False, **ACTIVATIONS["silu"]}


def causal_conv(
    g: Graph, x: Tensor, weight: Tensor, bias: Tensor | None, batch: BatchBuffers
) -> Tensor:
    """Computes silu(conv(x)) within each sample.

    conv(x)[t] = bias + Σ_k weight[:, k] · x[t - taps + 1 + k], channel by channel. Where text is
    generated, the last tokens' x are kept in the batch's cache.

    Args:
        g: The graph.
        x: (rows, channels) operand; channels is a multiple of 8.
        weight: (channels, taps) float32, frozen.
        bias: (channels) float32, frozen, or None.
        batch: The micro-batch's shape, segments and cache.

    Returns:
        (rows, channels) operand.

    Raises:
        GraphError: If the shapes do not fit.
    """
    channels, taps = weight.shape
    wrong = channels % 8 or x.columns != channels or x.rows != batch.rows
    if wrong or (bias is not None and bias.columns != channels):
        raise GraphError(f"causal_conv: {x}, {weight} and {bias} do not fit")
    y = g.operand(f"conv({x.name})", x.rows, channels)
    constants = {**_CONSTANTS, "TAPS": taps}
    convolve(g, x, y, (weight, bias), batch, constants, "short_conv/backward_silu.wgsl")
    return y
