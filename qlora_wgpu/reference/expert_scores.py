"""Routing by scores: s = sigmoid(logits) or softmax(logits); s + bias chooses, s weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rule:
    """What makes weights of scores: the fields of ``ops.scored_routing.Scoring``."""

    sigmoid: bool
    normalized: bool
    least: float = 0.0
    at_least: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    pairs: bool = False


def scores_of(logits: Array, *, sigmoid: bool) -> Array:
    """Scores (rows, experts)."""
    if sigmoid:
        single: Array = 1 / (1 + np.exp(-logits))
        return single
    e = np.exp(logits - logits.max(1, keepdims=True))
    shares: Array = e / e.sum(1, keepdims=True)
    return shares


def route(logits: Array, bias: Array, top: int, rule: Rule) -> tuple[Ids, Array]:
    """Ids (rows, top) of the chosen experts, the best first, and their weights."""
    scores = scores_of(logits, sigmoid=rule.sigmoid)
    preference = scores + bias
    grouped = preference.reshape(len(logits), rule.groups, -1)
    best = -np.sort(-grouped, axis=2)[:, :, : 1 + rule.pairs].sum(2)
    closed = np.argsort(-best, axis=1, kind="stable")[:, rule.top_groups :]
    masked = grouped.copy()
    np.put_along_axis(masked, closed[:, :, None], -np.inf, 1)
    ids = np.argsort(-masked.reshape(preference.shape), axis=1, kind="stable")[:, :top]
    return ids, weights_of(scores, ids, rule)


def weights_of(scores: Array, ids: Ids, rule: Rule) -> Array:
    """The weights (rows, top) of the chosen."""
    chosen = np.take_along_axis(scores, ids, 1)
    weights: Array = rule.scale * chosen / _divisor(chosen, rule)
    return weights


def route_backward(dw: Array, logits: Array, ids: Ids, rule: Rule) -> Array:
    """d logits (rows, experts) from the gradient (rows, top) of the weights."""
    scores = scores_of(logits, sigmoid=rule.sigmoid)
    chosen = np.take_along_axis(scores, ids, 1)
    d, total = _divisor(chosen, rule), chosen.sum(1, keepdims=True)
    grows = rule.normalized & ~(rule.at_least & (total < rule.least))
    dchosen = rule.scale * (dw / d - grows * (dw * chosen).sum(1, keepdims=True) / d**2)
    dscores = np.zeros_like(scores)
    np.put_along_axis(dscores, ids, dchosen, 1)
    if rule.sigmoid:
        single: Array = dscores * scores * (1 - scores)
        return single
    dlogits: Array = scores * (dscores - (scores * dscores).sum(1, keepdims=True))
    return dlogits


def _divisor(chosen: Array, rule: Rule) -> Array:
    total: Array = chosen.sum(1, keepdims=True)
    if not rule.normalized:
        return np.ones_like(total)
    return np.maximum(total, rule.least) if rule.at_least else total + rule.least
