"""Gated delta nets (Yang et al., 2024) and short convolutions, exact forward and backward."""

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
    """Computes o_t = S_tᵀ · q_t of each value head's state S, (key_dim, value_dim).

    S_t = exp(decay_t) · S_{t-1} + k_t ⊗ beta_t · (v_t - (exp(decay_t) · S_{t-1})ᵀ · k_t). It begins
    with zeros at every sample; padding leaves it as it is, and has zeros for o. q and k are first
    divided by √(Σx² + 1e-6) over each head, q by √key_dim besides. All of it is float32 within.

    Tokens are taken in chunks, whose updates are one triangular system (the WY form). Nothing is
    kept for the backward but the arguments. On the way the forward has 8 · chunk + 32 bytes for a
    token of a value head, the backward 20 · chunk + 8 · key_dim · (value_dim / chunk + 1) +
    8 · value_dim + 64, of as many heads at once as a binding has room for.

    Where text is generated, the state after the last token is kept in the batch's cache, and a new
    token updates it.

    Args:
        g: The graph.
        q: (rows, num_key_heads · key_dim) operand.
        k: Like q.
        v: (rows, num_value_heads · value_dim) operand.
        decay: (rows, num_value_heads) float32, logarithms that are zero at most.
        beta: (rows, num_value_heads) float32, between 0 and 1.
        batch: The micro-batch's shape, segments and cache.
        num_key_heads: Heads of q and k; each serves num_value_heads / num_key_heads neighbours.
        num_value_heads: Heads of v, a multiple of num_key_heads.
        key_dim: Elements of a head of q and k, a multiple of 8, at most 512.
        value_dim: Elements of a head of v, a multiple of 8.
        chunk: Tokens of a chunk, 16, 32 or 64; results differ in rounding alone.

    Returns:
        (rows, num_value_heads · value_dim) operand.
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
    g: Graph, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes decay = -exp(a_log) · softplus(a + dt_bias) and beta = sigmoid(b).

    Args:
        g: The graph.
        a: (rows, value heads) of any type.
        b: Like a.
        a_log: (value heads) float32, frozen.
        dt_bias: Like a_log.

    Returns:
        decay, the logarithm of what is kept of the state, and beta; both (rows, value heads)
        float32.
    """
    if a.shape != b.shape or {a_log.columns, dt_bias.columns} != {a.columns}:
        raise GraphError(f"gated_delta_gates: {a}, {b}, {a_log} and {dt_bias} do not fit")
    decay, beta = (g.float32(name, *a.shape) for name in ("decay", "beta"))
    inputs = {"a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias}
    units = a.rows * a.units(8)
    params = {"units": units, "heads": a.columns}
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
        "taps": taps,
    }
    if batch.cache is not None:
        state = batch.cache.next_state(taps, channels)
        _keep(g, x, state, batch, shape, constants)
        if batch.decodes:
            # Without gates all that is needed of x is in the state.
            read = tensors if constants["GATED"] else {**tensors, "x": None}
            step = {**read, "y": y, "state": state, **_texts(batch)}
            sizes = {**shape, "stride": x.units(8)}  # given even where x is not bound
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
    """Keeps what later tokens need of the last ones."""
    tensors = {"segments": batch.segments, **_texts(batch), "x": x, "state": state}
    units = x.rows * shape["hidden"]
    g.launch(
        "short_conv/keep.wgsl", units, tensors, shape,
        {**constants, "APART": batch.decodes},
    )  # fmt: skip


def _texts(batch: BatchBuffers) -> dict[str, Tensor | None]:
    """Which text each row is of, and where in it."""
    return {"positions": batch.positions, "places": batch.places}


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
    """
    channels, taps = weight.shape
    wrong = channels % 8 or x.columns != channels or x.rows != batch.rows
    if wrong or (bias is not None and bias.columns != channels):
        raise GraphError(f"causal_conv: {x}, {weight} and {bias} do not fit")
    y = g.operand(f"conv({x.name})", x.rows, channels)
    constants = {**_PLAIN, "TAPS": taps}
    convolve(g, x, y, (weight, bias), batch, constants, "short_conv/backward_silu.wgsl")
    return y
