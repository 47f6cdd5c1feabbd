"""Attention with full score matrices, RoPE, and the composition of heads."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from qlora_wgpu.reference.tape import Array, constant

Part = tuple[Array, int, int, int]
"""A matrix, its columns per head (0: shared by all heads), the first column, and the number."""


def visible(
    segments: npt.NDArray[np.integer],
    window: int | None = None,
    blocks: npt.NDArray[np.integer] | None = None,
) -> npt.NDArray[np.bool_]:
    """The kernels' mask (batch, query, key) from segments (batch, seq), 0 for padding.

    ``blocks``, (batch, seq, 2), are each query's (begin, end): it sees later keys before the end.
    """
    seq = segments.shape[1]
    back = np.arange(seq)[:, None] - np.arange(seq)
    near = np.broadcast_to(back >= 0, (len(segments), seq, seq))
    if blocks is not None:
        at = np.arange(seq)
        near = near | ((at >= blocks[..., :1]) & (at < blocks[..., 1:]))
    near = near & (back < (window or seq))
    query, key = segments[:, :, None], segments[:, None, :]
    seen: npt.NDArray[np.bool_] = near & (key != 0) & ((query == 0) | (query == key))
    return seen


def attention(
    q: Array,
    k: Array,
    v: Array,
    segments: npt.NDArray[np.integer],
    head_dim: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    stored: Array | None = None,
    blocks: npt.NDArray[np.integer] | None = None,
) -> Array:
    """q (batch · seq, heads · head_dim), k and v (batch · seq, kv_heads · head_dim).

    ``sinks`` (heads) are additional logits without a value in softmax's sums. Softmax's gradient
    subtracts do·o, with ``stored``, the rounded output, if given.
    """
    group = q.shape[1] // k.shape[1]
    qh = _heads(q, segments.shape, head_dim)
    kh = np.repeat(_heads(k, segments.shape, head_dim), group, axis=1)
    vh = np.repeat(_heads(v, segments.shape, head_dim), group, axis=1)
    scores = np.einsum("bhqd,bhkd->bhqk", qh, kh) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(visible(segments, window, blocks)[:, None], scores, -np.inf)
    sink = np.full((1, 1, 1, 1), -np.inf) if sinks is None else sinks[None, :, None, None]
    top = np.maximum(np.max(scores, axis=-1, keepdims=True), sink)
    top = np.where(np.isfinite(top), top, 0.0)
    e = np.exp(scores - top)
    total = np.sum(e, axis=-1, keepdims=True) + np.exp(sink - top)
    total = np.where(total > 0, total, 1.0)  # a query without visible keys gets zeros
    sums = np.einsum("bhqk,bhkd->bhqd", e, vh)
    if stored is None:
        return _rows(sums / total)
    one = total / constant(total)
    return _rows(sums / constant(total) - _heads(stored, segments.shape, head_dim) * (one - 1))


def rope(
    x: Array,
    positions: npt.NDArray[np.integer],
    table: Array,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool = False,
) -> Array:
    """Rotation of halves as in Llama, or interleaved.

    x (rows, heads · head_dim), table (positions, rotary_dim / 2, 2) of (cos, sin).
    """
    heads = x.reshape(len(x), -1, head_dim)
    cos, sin = table[positions, None, :, 0], table[positions, None, :, 1]
    order = np.arange(rotary_dim).reshape((-1, 2) if interleaved else (2, -1))
    low, high = order.T if interleaved else order
    first, second = heads[..., low], heads[..., high]
    turned = [first * cos - second * sin, second * cos + first * sin, heads[..., rotary_dim:]]
    back = np.argsort(np.concatenate([low, high, np.arange(rotary_dim, head_dim)]))
    return np.concatenate(turned, axis=2)[..., back].reshape(x.shape)


def group_columns(x: Array, groups: int, group: int, first: int, widths: Sequence[int]) -> Array:
    """Parts of every group of columns of (rows, groups · group), equal parts joined."""
    own = np.arange(groups * group).reshape(groups, group)
    ends = first + np.cumsum([0, *widths])
    return x[:, np.concatenate([own[:, a:b].reshape(-1) for a, b in pairwise(ends)])]


def head_parts(parts: Sequence[Part], heads: int, head_dim: int) -> Array:
    """y (rows, heads · head_dim), padded with zeros after the parts of each head."""
    rows = len(parts[0][0])
    taken = [
        x.reshape(rows, heads, group)[:, :, first : first + width]
        if group
        else np.repeat(x.reshape(rows, 1, -1)[:, :, first : first + width], heads, axis=1)
        for x, group, first, width in parts
    ]
    rest = np.zeros((rows, heads, head_dim - sum(width for *_, width in parts)))
    return np.concatenate([*taken, rest], axis=2).reshape(rows, heads * head_dim)


def _heads(x: Array, shape: tuple[int, ...], head_dim: int) -> Array:
    return x.reshape(shape[0], shape[1], -1, head_dim).transpose(0, 2, 1, 3)


def _rows(x: Array) -> Array:
    batch, heads, seq, head_dim = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch * seq, heads * head_dim)
