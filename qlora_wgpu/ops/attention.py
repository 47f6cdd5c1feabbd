"""Attention with grouped keys, forward and backward, and decoding with a KV cache."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor, ceil_div
from qlora_wgpu.kernels.attention import ATTENTION, Attention, Gradients
from qlora_wgpu.kernels.common import row_constants, row_workgroups
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.kv_cache import CacheView
from qlora_wgpu.ops.tensor import converted


def append(
    g: Graph, pair: tuple[Tensor, Tensor], layer: tuple[Tensor, Tensor], batch: BatchBuffers
) -> None:
    (k, v), (keys, values), cache = pair, layer, batch.cache
    if cache is None or not k.columns == v.columns == keys.columns == values.columns:
        raise GraphError(f"kv_cache: {k} and {v} do not fit {keys}")
    k, v = converted(g, k, keys.dtype), converted(g, v, values.dtype)
    words = k.nbytes // 16 // k.rows
    g.launch(
        "kv_cache/append.wgsl",
        k.rows * words,
        {"k": k, "v": v, **batch.texts, "keys": keys, "values": values},
        {"capacity": cache.capacity},
    )


def attend(
    g: Graph,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: BatchBuffers,
    head_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's new token to its cached tokens, itself included.

    keys and values are (sequences · capacity, kv_heads · head_dim); the batch has each row's
    sequence and its number of earlier tokens. The rest is as for ``attention``.
    """
    if batch.cache is None or not batch.decodes or q.rows != batch.rows:
        raise GraphError(f"kv_cache: {q} is not one token per sequence")
    heads, capacity = q.columns // head_dim, batch.cache.capacity
    unit = 4 if head_dim % 4 == 0 else 2
    units, cut = head_dim // unit, row_constants(g)
    threads, few = int(cut["THREADS"]), g.profile.unit_by_unit == 1
    at_once = min(units, threads)
    constants: dict[str, Constant] = {
        **cut,
        "HEAD_UNIT4": unit == 4,
        "UNITS": units,
        "UNITS_AT_ONCE": at_once,
        "GROUPS": (groups := threads // at_once),
        "TURNS": ceil_div(threads, groups),
        "OWN": ceil_div(units, at_once),
        "SOFTCAP": softcap is not None,
        "LOADS_FEW": few,
        "AHEAD": next(n for n in (8, 4, 2, 1) if units % n == 0),
        "SOFTWARE": threads == 1 or g.profile.textures,
        "KEYS": 8 if threads == 1 else 1,
        "TOGETHER": 8 if threads == 1 else 1,
    }
    o = g.operand("attention", q.rows, q.columns)
    g.launch(
        "kv_cache/attend.wgsl",
        row_workgroups(g, q.rows * heads),
        {"q": q, "keys": keys, "values": values, "o": o, **batch.texts, "sinks": sinks},
        {
            "heads": heads,
            "group": q.columns // keys.columns,
            "capacity": capacity,
            "window": min(window or capacity, capacity),
            "scale": scale,
            "softcap": softcap or 1.0,
        },
        constants,
    )
    return o


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
    """softmax(scale · q·kᵀ, causal and masked by ``batch.segments``) · v, per head; an operand.

    k and v are (rows, kv_heads · head_dim), and kv_heads divides q's heads. A query attends to
    ``window`` keys, including its own, or to all earlier ones, and to the later ones of its block
    if the batch has ``blocks``. With a softcap, scores s become
    softcap · tanh(s / softcap); sinks, float32 (heads), frozen, are a logit of each head without a
    value.
    """
    _check(q, k, v, head_dim)
    if batch.cache is not None:
        keys, values = _stored(g, k, v, batch, batch.cache)
        if batch.decodes:
            return attend(g, q, keys, values, batch, head_dim, scale, window, softcap, sinks)
    o = g.operand("attention", q.rows, q.columns)
    lse = g.float_vector("lse", q.rows * q.columns // head_dim)
    window = min(window or batch.seq, batch.seq)
    blocks = batch.blocks is not None
    segments = batch.blocks if batch.blocks is not None else batch.segments
    problem = Attention(
        q, k, v, o, lse, segments, batch.batch, head_dim, scale, window, softcap, sinks, blocks,
    )  # fmt: skip
    ATTENTION.launch(g, problem)

    def vjp(do: Tensor) -> None:
        dq = g.operand("d q", q.rows, q.columns) if q.requires_grad else None
        dk = dv = None
        if k.requires_grad or v.requires_grad:
            dk, dv = (g.operand(f"d {n}", k.rows, k.columns) for n in ("k", "v"))
        again = replace(problem, q=g.rematerialize(q), k=g.rematerialize(k), v=g.rematerialize(v))
        ATTENTION.launch(g, replace(again, gradients=Gradients(do, dq, dk, dv)))
        for x, dx in ((q, dq), (k, dk), (v, dv)):
            if dx is not None:
                g.add_gradient(x, dx)

    g.record(o, [q, k, v], vjp)
    return o


def _stored(
    g: Graph, k: Tensor, v: Tensor, batch: BatchBuffers, cache: CacheView
) -> tuple[Tensor, Tensor]:
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
