"""The gated short convolution of LFM2 (Liquid AI, 2025): depthwise, causal, of a few tokens."""

from __future__ import annotations

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.batch import BatchBuffers

_GATED: dict[str, Constant] = {"GATED": True}


def short_conv(
    g: Graph, x: Tensor, weight: Tensor, bias: Tensor | None, batch: BatchBuffers
) -> Tensor:
    """Computes C · conv(B · v) of x = [B | C | v], within each sample.

    conv(u)[t] = bias + Σ_k weight[:, k] · u[t - taps + 1 + k], channel by channel. Where text is
    generated, the products of the last tokens are kept in the batch's cache.

    Args:
        g: The graph.
        x: (rows, 3 · hidden) operand; hidden is a multiple of 8.
        weight: (hidden, taps) float32, frozen.
        bias: (hidden) float32, frozen, or None.
        batch: The micro-batch's shape, segments and cache.

    Returns:
        (rows, hidden) operand.

    Raises:
        GraphError: If the shapes do not fit.
    """
    hidden, _ = weight.shape
    wrong = hidden % 8 or x.columns != 3 * hidden or x.rows != batch.rows
    if wrong or (bias is not None and bias.columns != hidden):
        raise GraphError(f"short_conv: {x}, {weight} and {bias} do not fit")
    y = g.operand("short_conv", x.rows, hidden)
    convolve(g, x, y, (weight, bias), batch, _GATED, "short_conv/backward.wgsl")
    return y


def convolve(
    g: Graph,
    x: Tensor,
    y: Tensor,
    frozen: tuple[Tensor, Tensor | None],
    batch: BatchBuffers,
    constants: dict[str, Constant],
    backward: str,
) -> None:
    """Adds the launches of a short convolution of x, gated or not, into y, and notes its backward.

    Args:
        g: The graph.
        x: (rows, ·) operand.
        y: (rows, channels) operand.
        frozen: The weight (channels, taps) and the bias, if there is one.
        batch: The micro-batch's shape, segments and cache.
        constants: Of all its kernels: GATED, and the activation if there is one.
        backward: The shader of the backward.
    """
    weight, bias = frozen
    channels, taps = weight.shape
    tensors = {"x": x, "weight": weight, "bias": bias}
    shape = {
        "hidden": channels // 8,
        "stride": x.units(8),
        "taps": taps,
        "weight_stride": weight.stride,
    }
    if batch.cache is not None:
        state = batch.cache.next_state(taps, channels)
        _keep(g, x, state, batch, shape, constants)
        if batch.decodes:
            # Without gates all that is read of x is in the state.
            read = tensors if constants["GATED"] else {**tensors, "x": None}
            step = {**read, "y": y, "state": state, **_texts(batch)}
            sizes = {"rows": x.rows, **shape}
            g.launch("short_conv/step.wgsl", x.rows * channels // 8, step, sizes, constants)
            return
    units, params = x.rows * channels // 8, {"rows": x.rows, "seq": batch.seq, **shape}
    inputs = {"segments": batch.segments, **tensors}
    g.launch("short_conv/forward.wgsl", units, {**inputs, "y": y}, params, constants)

    def vjp(dy: Tensor) -> None:
        dx = g.operand(f"d {x.name}", x.rows, x.columns)
        g.launch(backward, units, {**inputs, "dy": dy, "dx": dx}, params, constants)
        g.add_gradient(x, dx)

    g.record(y, [x], vjp)


def _keep(
    g: Graph,
    x: Tensor,
    state: Tensor,
    batch: BatchBuffers,
    shape: dict[str, int],
    constants: dict[str, Constant],
) -> None:
    """Keeps what the tokens to come need of the last ones."""
    tensors = {"segments": batch.segments, **_texts(batch), "x": x, "state": state}
    params = {name: shape[name] for name in ("hidden", "stride", "taps")}
    units = x.rows * shape["hidden"]
    g.launch(
        "short_conv/keep.wgsl", units, tensors, {"rows": x.rows, **params},
        {**constants, "APART": batch.decodes},
    )  # fmt: skip


def _texts(batch: BatchBuffers) -> dict[str, Tensor | None]:
    """Which text each row is of, and where in it."""
    return {"positions": batch.positions, "places": batch.places}
