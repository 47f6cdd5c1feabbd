"""An embedding with LoRA: y = scale · (W[ids] + s·Aᵀ[ids]·Bᵀ), and the gradients of A and B."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.integer]


def forward(weight: Array, ids: Indices, a: Array, b: Array, s: float, scale: float = 1.0) -> Array:
    """Returns (len(ids), hidden), of weight (vocab, hidden), a (r, vocab), b (hidden, r)."""
    y: Array = scale * (weight[ids] + s * a.T[ids] @ b.T)
    return y


def backward(
    dy: Array,
    ids: Indices,
    a: Array,
    b: Array,
    s: float,
    scale: float = 1.0,
    padding: int | None = None,
) -> tuple[Array, Array]:
    """Returns dA (r, vocab), to which ids that are padding add nothing, and dB (hidden, r)."""
    du, da = scale * s * dy @ b, np.zeros_like(a)
    for place, token in enumerate(ids):
        if token != padding:
            da[:, token] += du[place]
    return da, dy.T @ (scale * s * a.T[ids])
