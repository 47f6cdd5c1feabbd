"""A mixture of experts: y = Σ_j w[j] · (W·x + b)[e(j)] over the top experts of each row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def route(logits: Array, top: int, *, normalized: bool) -> tuple[Ids, Array]:
    """Ids (rows, top) of the largest logits, and their softmax over all or over the chosen."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :top]
    e = np.exp(logits - logits.max(1, keepdims=True))
    chosen = np.take_along_axis(e, ids, 1)
    return ids, chosen / (chosen if normalized else e).sum(1, keepdims=True)


def with_factors(weights: Array, ids: Ids, factors: Array) -> Array:
    """(rows, top) times the factor (experts) of each; what it makes of dy is d weights, too."""
    return weights * factors[ids]


def slots_of(ids: Ids, experts: int, tile: int) -> tuple[Ids, Ids]:
    """Slots (rows · top) of assignments, and (experts, 2) each expert's first and past its last.

    Each expert's begin with a whole tile, and are given in the order of the assignments.
    """
    counts = np.bincount(ids.ravel(), minlength=experts)
    first = np.cumsum(-(-counts // tile) * tile) - -(-counts // tile) * tile
    order = np.argsort(ids.ravel(), kind="stable")
    within = np.arange(ids.size) - np.repeat(np.cumsum(counts) - counts, counts)
    slots = np.empty(ids.size, np.int64)
    slots[order] = first[ids.ravel()[order]] + within
    return slots, np.stack([first, first + counts], 1)


def route_backward(dw: Array, logits: Array, ids: Ids, *, normalized: bool) -> Array:
    """d logits (rows, experts) from the gradient (rows, top) of the weights."""
    dlogits = np.zeros_like(logits)
    for t, chosen in enumerate(ids):
        among = chosen if normalized else np.arange(logits.shape[1])
        p = np.exp(logits[t, among] - logits[t].max())
        p /= p.sum()
        d = np.zeros(logits.shape[1])
        d[chosen] = dw[t]
        dlogits[t, among] = p * (d[among] - p @ d[among])
    return dlogits


def mix(x: Array, ids: Ids, weights: Array, w: Array, bias: Array | None = None) -> Array:
    """y (rows, out); w (experts, out, in), bias (experts, out)."""
    y: Array = np.einsum("tj,tjoi,ti->to", weights, w[ids], x)
    return y if bias is None else y + np.einsum("tj,tjo->to", weights, bias[ids])


def mix_backward(
    dy: Array, x: Array, ids: Ids, weights: Array, w: Array, bias: Array | None = None
) -> tuple[Array, Array, Array]:
    """Returns dx (rows, in), dweights (rows, top), dw (experts, out, in)."""
    dx = np.einsum("tj,tjoi,to->ti", weights, w[ids], dy)
    dweights = np.einsum("to,tjoi,ti->tj", dy, w[ids], x)
    if bias is not None:
        dweights += np.einsum("to,tjo->tj", dy, bias[ids])
    dw = np.zeros_like(w)
    for t, j in np.ndindex(ids.shape):
        dw[ids[t, j]] += weights[t, j] * np.outer(dy[t], x[t])
    return dx, dweights, dw
