"""xIELU (Huang & Schlag, 2024) and its slope; scalars are (alpha_p, alpha_n, beta, eps)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Scalars = tuple[float, float, float, float]


def forward(x: Array, scalars: Scalars) -> Array:
    """p · x² + β · x for x > 0, else n · (exp(min(x, eps)) - 1 - x) + β · x."""
    p, n, beta, eps = _bends(scalars)
    below = n * (np.expm1(np.minimum(x, eps)) - x)
    y: Array = np.where(x > 0, p * x * x, below) + beta * x
    return y


def slope(x: Array, scalars: Scalars) -> Array:
    """The derivative of ``forward``."""
    p, n, beta, eps = _bends(scalars)
    below = n * np.where(x < eps, np.expm1(np.minimum(x, eps)), -1.0)
    derivative: Array = np.where(x > 0, 2 * p * x, below) + beta
    return derivative


def _bends(scalars: Scalars) -> Scalars:
    """The numbers p, n, β and ε of the formula."""
    alpha_p, alpha_n, beta, eps = scalars
    return float(np.logaddexp(0, alpha_p)), float(beta + np.logaddexp(0, alpha_n)), beta, eps
