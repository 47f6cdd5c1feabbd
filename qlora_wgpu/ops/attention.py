"""Causal attention with grouped keys, forward and exact backward, without stored scores."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.attention import ATTENTION, Attention, Gradients
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.cached_attention import append, attend
from qlora_wgpu.ops.kv_cache import CacheView


def attention(
    g: Graph,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: BatchBuffers,
    head_dim: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q·kᵀ, causal and masked by ``batch.segments``) · v, per head.

    Args:
        g: The graph.
        q: (rows, heads · head_dim).
        k: (rows, kv_heads · head_dim); kv_heads divides heads.
        v: Like k.
        batch: The micro-batch's shape and segments.
        head_dim: Elements of a head; even.
        scale: Factor of the scores.
        window: A query sees so many keys, itself among them; None for all earlier ones.
        softcap: Scores s become softcap · tanh(s / softcap), if given.
        sinks: float32 (heads), frozen: a logit of each head that takes its share and has no value.

    Returns:
        (rows, heads · head_dim) operand.

    Raises:
        GraphError: If the shapes do not fit.
    """
    _check(q, k, v, head_dim)
    if batch.cache is not None:
        keys, values = _stored(g, k, v, batch, batch.cache)
        if batch.decodes:
            return attend(g, q, keys, values, batch, head_dim, scale, window, softcap, sinks)
    o = g.operand("attention", q.rows, q.columns)
    lse = g.float_vector("lse", q.rows * q.columns // head_dim)
    window = min(window or batch.seq, batch.seq)
    problem = Attention(
        q, k, v, o, lse, batch.segments, batch.batch, head_dim, scale, window, softcap,
        sinks,
    )  # fmt: skip
    ATTENTION.launch(g, problem)

    def vjp(do: Tensor) -> None:
        dq = g.operand("d q", q.rows, q.columns) if q.requires_grad else None
        dk = dv = None
        if k.requires_grad or v.requires_grad:
            dk, dv = (g.operand(f"d {n}", k.rows, k.columns) for n in ("k", "v"))
        again = replace(problem, q=g.again(q), k=g.again(k), v=g.again(v))
        ATTENTION.launch(g, replace(again, gradients=Gradients(do, dq, dk, dv)))
        for x, dx in ((q, dq), (k, dk), (v, dv)):
            if dx is not None:
                g.add_gradient(x, dx)

    g.record(o, [q, k, v], vjp)
    return o


def _stored(
    g: Graph, k: Tensor, v: Tensor, batch: BatchBuffers, cache: CacheView
) -> tuple[Tensor, Tensor]:
    """All keys and values so far, k and v stored behind them unless an earlier layer did so."""
    layer = cache.stored(k)
    if layer is None:
        most_texture = g.max_binding if g.profile.textures else 0
        layer = cache.next_layer(g.dtype, k.columns, most_texture)
        append(g, (k, v), layer, batch)
        cache.note_stored(k, layer)
    return layer


def _check(q: Tensor, k: Tensor, v: Tensor, head_dim: int) -> None:
    whole = not (head_dim % 2 or q.columns % head_dim or k.columns % head_dim)
    if not whole or q.columns % k.columns or k.shape != v.shape or q.rows != k.rows:
        raise GraphError(f"attention: {q}, {k}, {v} with head_dim {head_dim} do not fit")
