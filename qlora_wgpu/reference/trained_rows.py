"""Rows of an embedding or a head that take the place of the matrix's own, and their gradients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.integer]


def overwritten(weight: Array, indices: Indices, rows: Array) -> Array:
    """weight (vocab, columns) with ``rows`` in place of those that ``indices`` name."""
    whole = weight.copy()
    whole[indices] = rows
    return whole


def lookup_gradient(
    dy: Array, ids: Indices, indices: Indices, scale: float = 1.0, padding: int | None = None
) -> Array:
    """d rows of y = scale · overwritten(...)[ids]; none comes from ids that are padding."""
    kept = np.ones(len(ids), bool) if padding is None else ids != padding
    return scale * np.stack([dy[(ids == index) & kept].sum(axis=0) for index in indices])


def head_gradient(dlogits: Array, hidden: Array, indices: Indices, scale: float = 1.0) -> Array:
    """d rows of logits = scale · hidden · overwritten(...)ᵀ."""
    return scale * dlogits[:, indices].T @ hidden
