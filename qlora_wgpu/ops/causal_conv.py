"""The short convolution of Gated DeltaNet and Mamba: depthwise, causal, through SiLU."""

from __future__ import annotations

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.activation import ACTIVATIONS
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.short_conv import keep

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
    frozen = {"weight": weight, "bias": bias}
    shape = {
        "hidden": channels // 8,
        "stride": x.units(8),
        "taps": taps,
        "weight_stride": weight.stride,
    }
    if batch.cache is not None:
        state = batch.cache.next_state(taps, channels)
        keep(g, x, state, batch, shape, _CONSTANTS)
        if batch.rows == 1:
            tensors = {"y": y, "state": state, "batch_info": batch.info, **frozen}
            g.launch("short_conv/step.wgsl", channels // 8, tensors, shape, _CONSTANTS)
            return y
    units, params = x.rows * channels // 8, {"rows": x.rows, "seq": batch.seq, **shape}
    inputs = {"segments": batch.segments, "x": x, **frozen}
    g.launch("short_conv/forward.wgsl", units, {**inputs, "y": y}, params, _CONSTANTS)

    def vjp(dy: Tensor) -> None:
        dx = g.operand(f"d {x.name}", x.rows, channels)
        tensors = {**inputs, "dy": dy, "dx": dx}
        constants = {**_CONSTANTS, "TAPS": taps}
        g.launch("short_conv/backward_silu.wgsl", units, tensors, params, constants)
        g.add_gradient(x, dx)

    g.record(y, [x], vjp)
    return y
