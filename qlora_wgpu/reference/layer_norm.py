"""LayerNorm: y = x̂ · weight + bias, x̂ = (x - mean) / √(variance + eps), over each row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def forward(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """x (rows, columns), weight and bias (columns); returns (rows, columns)."""
    return _normed(x, eps)[0] * weight + bias


def backward(dy: Array, x: Array, weight: Array, eps: float) -> Array:
    """Returns dx = rstd · (g - mean(g) - x̂ · mean(g · x̂)), g = dy · weight."""
    normed, rstd = _normed(x, eps)
    g = dy * weight
    inner = g - g.mean(axis=1, keepdims=True) - normed * np.mean(g * normed, axis=1, keepdims=True)
    dx: Array = rstd * inner
    return dx


def _normed(x: Array, eps: float) -> tuple[Array, Array]:
    centred = x - x.mean(axis=1, keepdims=True)
    rstd = 1.0 / np.sqrt(np.mean(centred**2, axis=1, keepdims=True) + eps)
    return centred * rstd, rstd
