"""Causal attention with grouped keys and segments, scores in full."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def visible(segments: npt.NDArray[np.integer], window: int | None = None) -> npt.NDArray[np.bool_]:
    """(batch, seq) segments, 0 for padding: (batch, query, key), as the kernels' mask says."""
    seq = segments.shape[1]
    back = np.arange(seq)[:, None] - np.arange(seq)
    causal = (back >= 0) & (back < (window or seq))
    query, key = segments[:, :, None], segments[:, None, :]
    seen: npt.NDArray[np.bool_] = causal & (key != 0) & ((query == 0) | (query == key))
    return seen


def forward(
    q: Array,
    k: Array,
    v: Array,
    segments: npt.NDArray[np.integer],
    head_dim: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """q (batch · seq, heads · head_dim), k and v (batch · seq, kv_heads · head_dim).

    ``sinks`` (heads) are logits beside the keys' that have no value: softmax's sums contain them.
    """
    p, _, _, vh, _ = _parts(q, k, v, segments, head_dim, scale, window, softcap, sinks)
    return _rows(np.einsum("bhqk,bhkd->bhqd", p, vh))


def backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    segments: npt.NDArray[np.integer],
    head_dim: int,
    scale: float,
    o: Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Returns dq, dk, dv; those of a key are summed over the heads that share it.

    Softmax's gradient subtracts do·o; ``o`` is the output as it was stored, if it was rounded.
    """
    p, qh, kh, vh, slope = _parts(q, k, v, segments, head_dim, scale, window, softcap, sinks)
    doh = _heads(do, segments.shape, head_dim)
    dp = np.einsum("bhqd,bhkd->bhqk", doh, vh)
    if o is None:
        delta = np.sum(p * dp, axis=-1, keepdims=True)
    else:
        delta = np.sum(doh * _heads(o, segments.shape, head_dim), axis=-1, keepdims=True)
    ds = p * (dp - delta) * slope * scale
    dq = np.einsum("bhqk,bhkd->bhqd", ds, kh)
    dk = _ungroup(np.einsum("bhqk,bhqd->bhkd", ds, qh), k.shape[1] // head_dim)
    dv = _ungroup(np.einsum("bhqk,bhqd->bhkd", p, doh), v.shape[1] // head_dim)
    return _rows(dq), _rows(dk), _rows(dv)


def _parts(
    q: Array,
    k: Array,
    v: Array,
    segments: npt.NDArray[np.integer],
    head_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Array | None,
) -> tuple[Array, Array, Array, Array, Array]:
    qh = _heads(q, segments.shape, head_dim)
    group = q.shape[1] // k.shape[1]
    kh = np.repeat(_heads(k, segments.shape, head_dim), group, axis=1)
    vh = np.repeat(_heads(v, segments.shape, head_dim), group, axis=1)
    seen = visible(segments, window)[:, None]
    scores = np.einsum("bhqd,bhkd->bhqk", qh, kh) * scale
    slope = np.ones_like(scores)
    if softcap is not None:
        bent = np.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent**2
    scores = np.where(seen, scores, -np.inf)
    sink = np.full((1, 1, 1, 1), -np.inf) if sinks is None else sinks[None, :, None, None]
    top = np.maximum(np.max(scores, axis=-1, keepdims=True), sink)
    top = np.where(np.isfinite(top), top, 0.0)
    e = np.where(seen, np.exp(scores - top), 0.0)
    total = e.sum(-1, keepdims=True) + np.exp(sink - top)
    # A query that sees nothing gets zeros.
    p = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
    return p, qh, kh, vh, slope


def _heads(x: Array, shape: tuple[int, ...], head_dim: int) -> Array:
    return x.reshape(shape[0], shape[1], -1, head_dim).transpose(0, 2, 1, 3)


def _rows(x: Array) -> Array:
    batch, heads, seq, head_dim = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch * seq, heads * head_dim)


def _ungroup(x: Array, kv_heads: int) -> Array:
    batch, heads, seq, head_dim = x.shape
    summed: Array = x.reshape(batch, kv_heads, heads // kv_heads, seq, head_dim).sum(axis=2)
    return summed
