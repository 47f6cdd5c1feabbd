"""Elements kept within bounds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def forward(x: Array, limit: float) -> Array:
    """clamp(x, -limit, limit)."""
    return np.clip(x, -limit, limit)


def backward(dy: Array, x: Array, limit: float) -> Array:
    """dx: dy where x is within the limit, else 0."""
    return np.where(np.abs(x) <= limit, dy, 0.0)
