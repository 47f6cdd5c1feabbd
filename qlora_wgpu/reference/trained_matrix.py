"""A matrix of the vocabulary that is trained whole: the gradients of its lookups and its logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def lookup_gradient(
    dy: Array,
    ids: npt.NDArray[np.integer],
    rows: int,
    scale: float = 1.0,
    padding: int | None = None,
) -> Array:
    """d weight (rows, columns) of y = scale · weight[ids]; none comes from ids that are padding."""
    gradient = np.zeros((rows, dy.shape[1]))
    kept = np.ones(len(ids), bool) if padding is None else ids != padding
    np.add.at(gradient, ids[kept], scale * dy[kept])
    return gradient


def head_gradient(dlogits: Array, hidden: Array, scale: float = 1.0) -> Array:
    """d weight of logits = scale · hidden · weightᵀ."""
    return scale * dlogits.T @ hidden
