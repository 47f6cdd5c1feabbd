"""Mixtures of experts: routing, load balancing, and the experts' layers."""

from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.reference.pointwise import sigmoid
from qlora_wgpu.reference.tape import Array, constant

Ids = npt.NDArray[np.int64]


def route(logits: Array, top: int, *, normalized: bool) -> tuple[Ids, Array]:
    """Ids (rows, top) of the largest logits, and their softmax over all or the selected."""
    ids = _largest(logits, top)
    return ids, weights_of(logits, ids, normalized=normalized)


def route_by_scores(
    logits: Array,
    bias: Array | float,
    top: int,
    *,
    groups: int = 1,
    top_groups: int = 1,
    pairs: bool = False,
    **rule: Any,
) -> tuple[Ids, Array]:
    """Ids (rows, top) of the selected experts, the best first, and their weights.

    Options are the fields of ``ops.routing.Scoring``.
    """
    preference = scores_of(constant(logits), sigmoids=rule["sigmoid"]) + bias
    grouped = preference.reshape(len(logits), groups, -1)
    best = -np.sort(-grouped, axis=2)[:, :, : 1 + pairs].sum(2)
    masked = grouped.copy()
    np.put_along_axis(masked, _largest(best, groups)[:, top_groups:, None], -np.inf, 1)
    ids = _largest(masked.reshape(preference.shape), top)
    return ids, weights_of(logits, ids, **rule)


def weights_of(
    logits: Array,
    ids: Ids,
    *,
    normalized: bool,
    sigmoid: bool = False,
    least: float = 0.0,
    at_least: bool = False,
    scale: float = 1.0,
) -> Array:
    chosen = np.take_along_axis(scores_of(logits, sigmoids=sigmoid), ids, 1)
    if not normalized:
        return scale * chosen
    total = np.sum(chosen, axis=1, keepdims=True)
    return scale * chosen / (np.maximum(total, least) if at_least else total + least)


def with_factors(weights: Array, ids: Ids, factors: Array) -> Array:
    """Weights (rows, top) times the experts' factors (experts)."""
    return weights * factors[ids]


def slots_of(ids: Ids, experts: int, tile: int) -> tuple[Ids, Ids]:
    """Slots (rows · top) of assignments, and each expert's first and last + 1, (experts, 2).

    Each expert's slots start with a whole tile and are in the order of the assignments.
    """
    counts = np.bincount(ids.ravel(), minlength=experts)
    first = np.cumsum(-(-counts // tile) * tile) - -(-counts // tile) * tile
    order = np.argsort(ids.ravel(), kind="stable")
    within = np.arange(ids.size) - np.repeat(np.cumsum(counts) - counts, counts)
    slots = np.empty(ids.size, np.int64)
    slots[order] = first[ids.ravel()[order]] + within
    return slots, np.stack([first, first + counts], 1)


def mix(x: Array, ids: Ids, weights: Array, w: Array, bias: Array | None = None) -> Array:
    """y (rows, out); x (rows, in), weights (rows, top), w (experts, out, in)."""
    y = np.einsum("tj,tjoi,ti->to", weights, w[ids], x)
    return y if bias is None else y + np.einsum("tj,tjo->to", weights, bias[ids])


def balance_sums(logits: Array, top_k: int, mask: Array) -> Array:
    """(2, experts): selections of each, and its probabilities, summed over rows with mask 1."""
    chosen = np.zeros(logits.shape)
    np.put_along_axis(chosen, _largest(logits, top_k), 1.0, 1)
    shares = mask[:, None] * scores_of(logits, sigmoids=False)
    return np.stack([mask @ chosen, np.sum(shares, axis=0)])


def balance_loss(layers: Any, top_k: int, mask: Array) -> Array:
    """experts · Σ_e f[e] · P[e] over the rows of all layers, each (rows, experts)."""
    total: Any = sum(balance_sums(logits, top_k, mask) for logits in layers)
    chosen, probability = total
    rows = len(layers) * mask.sum()
    return layers[0].shape[1] * np.sum((chosen / rows) * (probability / rows))


def _largest(x: Array, count: int) -> Ids:
    return np.argsort(-constant(x), axis=1, kind="stable")[:, :count]


def scores_of(logits: Array, *, sigmoids: bool) -> Array:
    """Scores (rows, experts): sigmoids, or a softmax."""
    if sigmoids:
        return sigmoid(logits)
    e = np.exp(logits - np.max(logits, axis=1, keepdims=True))
    return e / np.sum(e, axis=1, keepdims=True)
