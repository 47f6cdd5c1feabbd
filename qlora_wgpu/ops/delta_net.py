"""Gated delta nets (Yang et al., 2024) and short convolutions, forward and backward."""

from __future__ import annotations

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels import gated_delta as kernels
from qlora_wgpu.kernels.gated_delta import CHUNK, GatedDelta, Gradients
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.pointwise import ACTIVATIONS

# ---- gated delta rule ------------------------------------------------------------------------


def gated_delta_rule(
    g: Graph,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    batch: BatchBuffers,
    num_key_heads: int,
    num_value_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """o_t = S_tᵀ · q_t of each value head's state S, (key_dim, value_dim); an operand like v.

    S_t = exp(decay_t) · S_{t-1} + k_t ⊗ beta_t · (v_t - (exp(decay_t) · S_{t-1})ᵀ · k_t). It is
    zero at the start of every sample; padding does not change it and has zeros for o. q and k are
    first divided by √(Σx² + 1e-6) over each head, q also by √key_dim. All of it is float32 inside.

    Tokens are processed in chunks of 16, 32 or 64, whose updates are one triangular system (the WY
    form); results differ only in rounding. Only the arguments are kept for the backward pass. The
    forward needs 8 · chunk + 32 temporary bytes per token and value head, the backward 20 · chunk +
    8 · key_dim · (value_dim / chunk + 1) + 8 · value_dim + 64, for as many heads at once as fit a
    binding.

    q and k are (rows, num_key_heads · key_dim), at most 512 of them, v (rows, num_value_heads ·
    value_dim), operands; decay, logarithms ≤ 0, and beta, between 0 and 1, are (rows,
    num_value_heads) float32. num_value_heads / num_key_heads neighbouring value heads share a key
    head. In generation, the state after the last token is kept in the batch's cache, and each new
    token updates it.
    """
    keys, values = (num_key_heads, key_dim), (num_value_heads, value_dim)
    for x, (heads, size) in (
        *((x, keys) for x in (q, k)),
        (v, values),
        *((x, (num_value_heads, 1)) for x in (decay, beta)),
    ):
        if x.shape != (batch.rows, heads * size):
            raise GraphError(f"gated_delta_rule: {x} is not {batch.rows}x{heads * size}")
    if num_value_heads % num_key_heads or key_dim % 8 or value_dim % 8:
        raise GraphError(f"gated_delta_rule: {keys} and {values} are no heads of multiples of 8")
    problem = GatedDelta(
        q, k, v, decay, beta, batch.segments, batch.batch, key_dim, value_dim, chunk
    )
    o = g.operand("gated delta", v.rows, v.columns)
    state = None
    if batch.cache is not None:
        state = batch.cache.next_state(num_value_heads * key_dim, value_dim)
        assert batch.places is not None
        if batch.decodes:
            kernels.step(g, problem, state, batch.places, o)
            return o
    kernels.forward(g, problem, o, state, batch.places)

    def vjp(do: Tensor) -> None:
        gradients = Gradients(
            do,
            g.new_gradient(q),
            g.new_gradient(k),
            g.new_gradient(v),
            *(g.float32(f"d {x.name}", *x.shape) for x in (decay, beta)),
        )
        kernels.backward(g, problem, gradients)
        for x, dx in (
            (q, gradients.dq),
            (k, gradients.dk),
            (v, gradients.dv),
            (decay, gradients.ddecay),
            (beta, gradients.dbeta),
        ):
            g.add_gradient(x, dx)

    g.record(o, [q, k, v, decay, beta], vjp)
    return o


def gated_delta_gates(
    g: Graph, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, largest: float = 1.0
) -> tuple[Tensor, Tensor]:
    """decay = -exp(a_log) · softplus(a + dt_bias) and beta = largest · sigmoid(b), in float32.

    a and b (rows, value heads) are of any type; a_log and dt_bias (value heads) float32, frozen.
    decay is the logarithm of the fraction of the state that is kept.
    """
    if a.shape != b.shape or {a_log.columns, dt_bias.columns} != {a.columns}:
        raise GraphError(f"gated_delta_gates: {a}, {b}, {a_log} and {dt_bias} do not fit")
    decay, beta = (g.float32(name, *a.shape) for name in ("decay", "beta"))
    inputs = {"a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias}
    units = a.rows * a.units(8)
    params = {"units": units, "heads": a.columns, "largest": largest}
    outputs = {"decay": decay, "beta": beta}
    g.launch("gated_delta/gates.wgsl", units, {**inputs, **outputs}, params)

    def vjp(gradients: list[Tensor | None]) -> None:
        da, db = g.new_gradient(a), g.new_gradient(b)
        given = {"ddecay": gradients[0], "dbeta": gradients[1], "da": da, "db": db}
        g.launch("gated_delta/gates_backward.wgsl", units, {**inputs, **given}, params)
        g.add_gradient(a, da)
        g.add_gradient(b, db)

    g.record_jointly([decay, beta], [a, b], vjp)
    return decay, beta


# ---- short convolutions ----------------------------------------------------------------------

_GATED: dict[str, Constant] = {"GATED": True}
_PLAIN: dict[str, Constant] = {"GATED": False, **ACTIVATIONS["silu"]}


def short_conv(
    g: Graph, x: Tensor, weight: Tensor, bias: Tensor | None, batch: BatchBuffers
) -> Tensor:
    """C · conv(B · v) of x = [B | C | v], operands, within each sample.

    conv(u)[t] = bias + Σ_k weight[:, k] · u[t - taps + 1 + k], channel by channel, weight (hidden,
    taps) float32, hidden a multiple of 8. In generation, the products of the last tokens are kept
    in the batch's cache.
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
    """Launches a short convolution of x, gated or not, into y, and records its VJP."""
    weight, bias = frozen
    channels, taps = weight.shape
    tensors = {"x": x, "weight": weight, "bias": bias}
    shape = {"hidden": channels // 8, "taps": taps}
    if batch.cache is not None:
        state = batch.cache.next_state(taps, channels)
        _keep(g, x, state, batch, shape, constants)
        if batch.decodes:
            # Without gates, the state has everything that is needed of x.
            read = tensors if constants["GATED"] else {**tensors, "x": None}
            step = {**read, "y": y, "state": state, **batch.texts}
            sizes = {**shape, "stride": x.units(8)}  # required even if x is not bound
            g.launch("short_conv/step.wgsl", x.rows * channels // 8, step, sizes, constants)
            return
    units, params = x.rows * channels // 8, {"seq": batch.seq, **shape}
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
    tensors = {"segments": batch.segments, **batch.texts, "x": x, "state": state}
    units = x.rows * shape["hidden"]
    g.launch(
        "short_conv/keep.wgsl", units, tensors, shape,
        {**constants, "APART": batch.decodes},
    )  # fmt: skip


def causal_conv(
    g: Graph, x: Tensor, weight: Tensor, bias: Tensor | None, batch: BatchBuffers
) -> Tensor:
    """silu(conv(x)) within each sample; see ``short_conv``.

    In generation, the last tokens' x are kept in the batch's cache.
    """
    channels, taps = weight.shape
    wrong = channels % 8 or x.columns != channels or x.rows != batch.rows
    if wrong or (bias is not None and bias.columns != channels):
        raise GraphError(f"causal_conv: {x}, {weight} and {bias} do not fit")
    y = g.operand(f"conv({x.name})", x.rows, channels)
    constants = {**_PLAIN, "TAPS": taps}
    convolve(g, x, y, (weight, bias), batch, constants, "short_conv/backward_silu.wgsl")
    return y
