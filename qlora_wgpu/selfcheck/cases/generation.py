"""Attention of a new token to keys and values that are kept."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.ops.attention import append, attention
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.ops.delta_net import causal_conv, gated_delta_rule, short_conv
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.ops.pointwise import qk_norm
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.reference import attention as attention_reference
from qlora_wgpu.reference import delta_net as delta_net_reference
from qlora_wgpu.reference import norms as norms_reference
from qlora_wgpu.selfcheck.cases.common import each, normal, of_halves, uneven
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner, rounded


def _batch(cache: KVCache, tokens: int, past: int, padding: int = 0) -> BatchBuffers:
    batch = make_batch_buffers(1, tokens + padding, CacheView(cache))
    mask = np.pad(np.ones((1, tokens), np.int64), ((0, 0), (0, padding)))
    batch.storage.data = encode_batch(batch, np.zeros_like(mask), mask, past=past)
    return batch


@each((True, 6), (False, 2))
def check_short_conv_step(run: Runner, has_bias: bool, prompt: int) -> None:
    """A prompt of more or fewer tokens than taps, padding behind it, then two tokens after it."""
    hidden, taps, cache = 16, 4, KVCache(9)
    x, weight = normal("x", prompt + 2, 3 * hidden), normal("weight", hidden, taps)
    bias = normal("bias", hidden)
    given = run.float32(bias) if has_bias else None
    outputs = []
    for first, last in ((0, prompt), (prompt, prompt + 1), (prompt + 1, prompt + 2)):
        padding = np.zeros((3 if first == 0 else 0, 3 * hidden))
        tx = run.operand(np.concatenate([x[first:last], padding]))
        batch = _batch(cache, last - first, first, len(padding))
        outputs.append(short_conv(run.graph, tx, run.float32(weight), given, batch))
    got = run.run(*outputs)
    exact = delta_net_reference.short_conv(
        run.rounded(x), weight, bias * has_bias, np.ones((1, prompt + 2), np.int64)
    )
    run.compare(np.concatenate([got[0][:prompt], *got[1:]]), exact, outputs[0].dtype)


@each((True, 6), (False, 2))
def check_causal_conv_step(run: Runner, has_bias: bool, prompt: int) -> None:
    """A prompt of more or fewer tokens than taps, padding behind it, then two tokens after it."""
    channels, taps, cache = 16, 4, KVCache(9)
    x, weight = normal("x", prompt + 2, channels), normal("weight", channels, taps)
    bias = normal("bias", channels)
    given = run.float32(bias) if has_bias else None
    outputs = []
    for first, last in ((0, prompt), (prompt, prompt + 1), (prompt + 1, prompt + 2)):
        padding = np.zeros((3 if first == 0 else 0, channels))
        tx = run.operand(np.concatenate([x[first:last], padding]))
        batch = _batch(cache, last - first, first, len(padding))
        outputs.append(causal_conv(run.graph, tx, run.float32(weight), given, batch))
    got = run.run(*outputs)
    exact = delta_net_reference.causal_conv(
        run.rounded(x), weight, bias * has_bias, np.ones((1, prompt + 2), np.int64)
    )
    run.compare(np.concatenate([got[0][:prompt], *got[1:]]), exact, outputs[0].dtype)


@each((24, 40), (8, 8))
def check_gated_delta_step(run: Runner, key_dim: int, value_dim: int) -> None:
    """A prompt with padding behind it, then two tokens after it."""
    prompt, total, cache = 66, 68, KVCache(70)
    heads = delta_net_reference.Heads(1, 2, key_dim, value_dim)
    q, k = normal("q", total, key_dim), normal("k", total, key_dim)
    v, decay = normal("v", total, 2 * value_dim), -np.exp(normal("decay", total, 2) - 2)
    beta = 1 / (1 + np.exp(-normal("beta", total, 2)))
    outputs = []
    for first, last in ((0, prompt), (prompt, prompt + 1), (prompt + 1, total)):
        padding = 3 if first == 0 else 0
        rows = [np.pad(x[first:last], ((0, padding), (0, 0))) for x in (q, k, v, decay, beta)]
        tq, tk, tv = map(run.operand, rows[:3])
        gates = run.float32(rows[3]), run.float32(rows[4])
        batch = _batch(cache, last - first, first, padding)
        sizes = 1, 2, key_dim, value_dim
        outputs.append(gated_delta_rule(run.graph, tq, tk, tv, *gates, batch, *sizes))
    got = run.run(*outputs)
    q, k, v = (run.rounded(x) for x in (q, k, v))
    mask = np.ones((1, total), np.int64)
    exact = delta_net_reference.gated_delta_rule(q, k, v, decay, beta, mask, heads)
    run.compare(np.concatenate([got[0][:prompt], *got[1:]]), exact, outputs[0].dtype)


@each(
    (20, 13, None, None, False),
    (64, 150, 7, None, True),
    (22, 13, 5, 3.0, False),
    (64, 13, None, 3.0, False),
)
def check_cached_attention(
    run: Runner,
    head_dim: int,
    prompt: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    """A prompt, then two tokens after it: with a window, a softcap, sinks and grouped heads."""
    total, cache, scale = prompt + 2, KVCache(prompt + 5), 1 / np.sqrt(head_dim)
    q = 2 * normal("q", total, 4 * head_dim)
    k, v = normal("k", total, 2 * head_dim), normal("v", total, 2 * head_dim)
    sinks = 2 * normal("sinks", 4).astype(np.float32).astype(np.float64) if has_sinks else None
    given = None if sinks is None else run.float32(sinks)
    outputs = []
    for first, last in ((0, prompt), (prompt, prompt + 1), (prompt + 1, total)):
        tq, tk, tv = (run.operand(a[first:last]) for a in (q, k, v))
        batch = _batch(cache, last - first, first)
        outputs.append(
            attention(run.graph, tq, tk, tv, batch, head_dim, scale, window, softcap, given)
        )
    got = np.concatenate(run.run(*outputs))
    q, k, v = (run.rounded(a) for a in (q, k, v))
    mask = np.ones((1, total), np.int64)
    exact = attention_reference.attention(q, k, v, mask, head_dim, scale, window, softcap, sinks)
    run.compare(got, exact, outputs[0].dtype, inner=of_halves(run))


@each(
    (64, 64, True, False, False),
    (40, 16, False, False, True),
    (24, 16, True, True, False),
    (16, 16, False, True, True),
    (40, 32, True, False, True),
)
def check_rotated_append(
    run: Runner, head_dim: int, rotary_dim: int, has_norms: bool, by_rows: bool, alone: bool
) -> None:
    """Queries and keys of three texts at unlike places, rotated, and what is kept of them.

    Args:
        run: Where it runs.
        head_dim: Elements of a head.
        rotary_dim: How many of them are rotated.
        has_norms: Whether heads are normalized before.
        by_rows: Whether the rows of the table are told.
        alone: Whether keys are rotated apart from queries.
    """
    g, capacity, past, places = run.graph, 5, np.array([[3], [0], [4]]), np.array([[1], [3], [0]])
    batch = make_batch_buffers(3, 1, CacheView(cache := KVCache(capacity, 4)))
    ids = np.zeros((3, 1), np.int64)
    batch.storage.data = encode_batch(batch, ids, ids + 1, past=past, places=places)
    table = normal("table", capacity, rotary_dim // 2, 2)
    rows = np.array([2, 2, 1]) if by_rows else past.ravel()
    numbers = Storage("rows", "check", 12, rows.astype(np.uint32))
    told = vector("rows", 3, "uint32", numbers) if by_rows else None
    q, k = uneven("q", 3, 6 * head_dim), uneven("k", 3, 2 * head_dim)
    v = normal("v", 3, 2 * head_dim)
    weights = [rounded(normal(f"{name} weight", head_dim), "float32") for name in "qk"]
    given, ys = [run.operand(q), run.operand(k)], []
    if has_norms:
        pairs = zip(given, weights, strict=True)
        given = [qk_norm(g, x, run.float32(weight), 1e-5) for x, weight in pairs]
    constant = g.constant("table", table.astype(np.float32))
    for some in (given[:1], given[1:]) if alone else (given,):
        ys += rope(g, some, constant, batch, head_dim, rotary_dim, rows=told)
    assert batch.cache is not None
    layer = batch.cache.next_layer(run.dtype, v.shape[1], g.max_binding * g.profile.textures)
    append(g, (ys[1], run.operand(v)), layer, batch)
    got_q, *kept = run.run(ys[0], *cache.layers[0])
    xs = [run.rounded(q), run.rounded(k)]
    if has_norms:
        normed = [_normed(x, weight) for x, weight in zip(xs, weights, strict=True)]
        xs = [run.rounded(x) for x in normed]
    turned = [attention_reference.rope(x, rows, table, head_dim, rotary_dim) for x in xs]
    # A norm that is off by float32's sums may be rounded to its neighbour.
    neighbour = ROUNDING[run.dtype] * 2.0 * has_norms
    run.compare(got_q, turned[0], run.dtype, by_row=True, inner=neighbour)
    at = (places * capacity + past).ravel()
    for got, exact, inner in zip(kept, (turned[1], run.rounded(v)), (neighbour, 0.0), strict=True):
        expected = np.zeros_like(got)
        expected[at] = exact
        run.compare(got[at], exact, run.dtype, by_row=True, inner=inner)
        run.compare_exactly(got[expected == 0], expected[expected == 0])


def _normed(x: Array, weight: Array) -> Array:
    """RMSNorm of each head."""
    heads = x.reshape(-1, len(weight))
    return norms_reference.rms_norm(heads, weight, 1e-5).reshape(x.shape)
