"""RMSNorm: y = x · rstd · weight, rstd = 1 / √(mean(x²) + eps), over each row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def forward(x: Array, weight: Array, eps: float) -> Array:
    """x (rows, columns), weight (columns); returns (rows, columns)."""
    return x * _rstd(x, eps) * weight


def backward(dy: Array, x: Array, weight: Array, eps: float) -> Array:
    """Returns dx = rstd · (g - x̂ · mean(g · x̂)), g = dy · weight, x̂ = x · rstd."""
    rstd = _rstd(x, eps)
    g, normed = dy * weight, x * rstd
    dx: Array = rstd * (g - normed * np.mean(g * normed, axis=1, keepdims=True))
    return dx


def _rstd(x: Array, eps: float) -> Array:
    rstd: Array = 1.0 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps)
    return rstd
