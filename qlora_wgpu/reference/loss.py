"""The loss of label rows through ``lm_head``, embeddings, and trained matrices."""

import numpy as np
import numpy.typing as npt

from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.reference.tape import Array, constant

Indices = npt.NDArray[np.integer]


def logits(hidden: Array, head: Array, scale: float = 1.0, softcap: float | None = None) -> Array:
    """z = scale · hidden · headᵀ, hidden (rows, columns), head (vocab, columns); with a softcap."""
    z = scale * (hidden @ head.T)
    return z if softcap is None else softcap * np.tanh(z / softcap)


def losses(
    hidden: Array,
    head: Array,
    targets: Indices,
    scale: float = 1.0,
    softcap: float | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Array:
    """The loss (rows) of each row whose target is not -100."""
    rows = np.flatnonzero(targets != IGNORE_INDEX)
    z = logits(hidden[rows], head, scale, softcap)
    top = np.max(z, axis=1, keepdims=True) if len(rows) else np.zeros((0, 1))
    lse = top[:, 0] + np.log(np.sum(np.exp(z - top), axis=1))
    hit = z[np.arange(len(rows)), targets[rows]]
    return lse - (1 - smoothing) * hit - smoothing * np.mean(z, axis=1) + z_loss * lse**2


def hits(
    hidden: Array, head: Array, targets: Indices, scale: float, softcap: float | None
) -> Array:
    """Whether each row's target has the largest logit, the first in a tie."""
    rows = np.flatnonzero(targets != IGNORE_INDEX)
    return logits(hidden[rows], head, scale, softcap).argmax(axis=1) == targets[rows]


def entropies(
    hidden: Array, head: Array, targets: Indices, scale: float, softcap: float | None
) -> Array:
    """-Σ p·log p (rows) of the distribution of each row whose target is not -100, in nats."""
    z = logits(hidden[np.flatnonzero(targets != IGNORE_INDEX)], head, scale, softcap)
    z = z - z.max(axis=1, keepdims=True)
    logps = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    return -(np.exp(logps) * logps).sum(axis=1)


def with_pair(
    hidden: Array, head: Array, a: Array, b: Array, s: float, mask: Array
) -> tuple[Array, Array]:
    """Hidden states and a head with r more columns, whose product includes the head's LoRA.

    It is hidden·Wᵀ + s·(mask∘hidden)·Aᵀ·Bᵀ.
    """
    u = s * ((mask * hidden) @ a.T)
    return np.concatenate([hidden, u], axis=1), np.concatenate([head, b], axis=1)


def overwritten(weight: Array, indices: Indices, rows: Array) -> Array:
    """weight (vocab, columns) with the rows ``indices`` replaced by ``rows``."""
    source = np.arange(len(weight))
    source[indices] = len(weight) + np.arange(len(indices))
    return np.concatenate([weight, rows])[source]


def lookup(weight: Array, ids: Indices, scale: float = 1.0, padding: int | None = None) -> Array:
    """scale · weight[ids]; padding has no gradient."""
    rows = weight[ids]
    return scale * np.where((ids == padding)[:, None], constant(rows), rows)


def with_features(y: Array, features: Array, places: Indices, scale: float) -> Array:
    """y (rows, hidden), but scale · features[place - 1] in the rows whose place is not 0."""
    return np.where((places > 0)[:, None], scale * features[np.maximum(places - 1, 0)], y)


def add_features(y: Array, features: Array, places: Indices) -> Array:
    """y (rows, hidden) plus features[place - 1] in the rows whose place is not 0."""
    return y + with_features(np.zeros(y.shape), features, places, 1.0)


def lookup_with_pair(
    weight: Array,
    ids: Indices,
    a: Array,
    b: Array,
    s: float,
    scale: float = 1.0,
    padding: int | None = None,
) -> Array:
    """(len(ids), hidden), of weight (vocab, hidden), a (r, vocab), b (hidden, r).

    A gets no gradient from padding.
    """
    return scale * weight[ids] + s * lookup(a.T, ids, scale, padding) @ b.T
