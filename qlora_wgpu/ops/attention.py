"""Attention with grouped keys, forward and backward, and decoding with a KV cache."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.gpu.wgsl import Constant, Workgroups
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
    heads, group, capacity = q.columns // head_dim, q.columns // keys.columns, batch.cache.capacity
    in_subgroups = g.profile.textures and head_dim % 8 == 0
    if in_subgroups:
        of_kernel = _in_subgroups(g, q.rows * heads, group, head_dim)
        workgroups: Workgroups = (ceil_div(q.rows * heads, int(of_kernel["HEADS"])), 1, 1)
    else:
        of_kernel = _in_workgroups(g, head_dim)
        workgroups = row_workgroups(g, q.rows * heads)
    o = g.operand("attention", q.rows, q.columns)
    g.launch(
        "kv_cache/attend_subgroup.wgsl" if in_subgroups else "kv_cache/attend.wgsl",
        workgroups,
        {"q": q, "keys": keys, "values": values, "o": o, **batch.texts, "sinks": sinks},
        {
            "heads": heads,
            "group": group,
            "capacity": capacity,
            "window": min(window or capacity, capacity),
            "scale": scale,
            "softcap": softcap or 1.0,
        },
        {**of_kernel, "SOFTCAP": softcap is not None},
        label="kv_cache/attend",
    )
    return o


_HELD = 256  # elements of queries that an invocation holds at most
_LEAST_WORKGROUPS = 8  # so that threads without one are few


def _in_subgroups(g: Graph, heads: int, group: int, head_dim: int) -> dict[str, Constant]:
    """How kv_cache/attend_subgroup.wgsl divides the heads of all rows."""
    threads, units = g.profile.subgroup_size, head_dim // 8
    at_once = min(1 << (units - 1).bit_length(), threads)
    most = min(_HELD // head_dim, heads // _LEAST_WORKGROUPS)
    together = next((n for n in (4, 3, 2) if group % n == 0 and n <= most), 1)
    return {
        "THREADS": threads,
        "HEADS": together,
        "QUERIES": ceil_div(together * units, threads),
        "UNITS": units,
        "UNITS_AT_ONCE": at_once,
        "GROUPS": (groups := threads // at_once),
        "EXCHANGES": groups.bit_length() - 1,
        "TURNS": at_once,
        "OWN": ceil_div(units, at_once),
    }


def _in_workgroups(g: Graph, head_dim: int) -> dict[str, Constant]:
    """How kv_cache/attend.wgsl divides a head."""
    unit = 4 if head_dim % 4 == 0 else 2
    units, cut = head_dim // unit, row_constants(g)
    threads = int(cut["THREADS"])
    at_once = min(units, threads)
    return {
        **cut,
        "SUBGROUP": False,
        "HEAD_UNIT4": unit == 4,
        "UNITS": units,
        "UNITS_AT_ONCE": at_once,
        "GROUPS": threads // at_once,
        "OWN": ceil_div(units, at_once),
        "LOADS_FEW": g.profile.unit_by_unit == 1,
        "AHEAD": next(n for n in (8, 4, 2, 1) if units % n == 0),
        "SOFTWARE": threads == 1 or g.profile.textures,
        "KEYS": 8 if threads == 1 else 1,
        "TOGETHER": 8 if threads == 1 else 1,
    }


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
