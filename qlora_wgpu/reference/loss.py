"""Both ends of a model: the loss of labelled rows through ``lm_head``, and trained matrices."""

import numpy as np
import numpy.typing as npt

from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.reference.tape import Array, constant

Indices = npt.NDArray[np.integer]


def logits(hidden: Array, head: Array, scale: float = 1.0, softcap: float | None = None) -> Array:
    """z = scale · hidden · headᵀ, of hidden (rows, columns), head (vocab, columns); or capped."""
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
    """The loss of each row that has a target (rows), which -100 is not."""
    rows = np.flatnonzero(targets != IGNORE_INDEX)
    z = logits(hidden[rows], head, scale, softcap)
    top = np.max(z, axis=1, keepdims=True) if len(rows) else np.zeros((0, 1))
    lse = top[:, 0] + np.log(np.sum(np.exp(z - top), axis=1))
    hit = z[np.arange(len(rows)), targets[rows]]
    return lse - (1 - smoothing) * hit - smoothing * np.mean(z, axis=1) + z_loss * lse**2


def hits(
    hidden: Array, head: Array, targets: Indices, scale: float, softcap: float | None
) -> Array:
    """Whether each row's target has the largest logit, the first of those that are as large."""
    rows = np.flatnonzero(targets != IGNORE_INDEX)
    return logits(hidden[rows], head, scale, softcap).argmax(axis=1) == targets[rows]


def with_pair(
    hidden: Array, head: Array, a: Array, b: Array, s: float, mask: Array
) -> tuple[Array, Array]:
    """Hidden states and a head with r more columns, whose product is that of the head and its LoRA.

    The losses take them as any others: hidden·Wᵀ + s·(mask∘hidden)·Aᵀ·Bᵀ.
    """
    u = s * ((mask * hidden) @ a.T)
    return np.concatenate([hidden, u], axis=1), np.concatenate([head, b], axis=1)


def overwritten(weight: Array, indices: Indices, rows: Array) -> Array:
    """weight (vocab, columns) with ``rows`` in place of those that ``indices`` name."""
    source = np.arange(len(weight))
    source[indices] = len(weight) + np.arange(len(indices))
    return np.concatenate([weight, rows])[source]


def lookup(weight: Array, ids: Indices, scale: float = 1.0, padding: int | None = None) -> Array:
    """scale · weight[ids]; ids that are padding give no gradient."""
    rows = weight[ids]
    return scale * np.where((ids == padding)[:, None], constant(rows), rows)


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

    Ids that are padding give no gradient to A.
    """
    return scale * weight[ids] + s * lookup(a.T, ids, scale, padding) @ b.T
