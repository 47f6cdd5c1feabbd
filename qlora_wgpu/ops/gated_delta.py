"""The gated delta rule (Yang et al., 2024, "Gated Delta Networks"), exact forward and backward."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels import gated_delta as kernels
from qlora_wgpu.kernels.gated_delta import CHUNK, GatedDelta, Gradients
from qlora_wgpu.ops.batch import BatchBuffers


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
        chunk: Tokens of a chunk, 16, 32 or 64; no matter of results but for rounding.

    Returns:
        (rows, num_value_heads · value_dim) operand.

    Raises:
        GraphError: If the shapes do not fit.
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
            g.gradient_for(q),
            g.gradient_for(k),
            g.gradient_for(v),
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
