"""A factor for each row: y[t] = sigmoid(gate[t]) · x[t]."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def forward(x: Array, gate: Array) -> Array:
    """y (rows, columns) from x and a gate (rows, 1)."""
    y: Array = x / (1 + np.exp(-gate))
    return y


def backward(dy: Array, x: Array, gate: Array) -> tuple[Array, Array]:
    """Returns dx (rows, columns), dgate (rows, 1)."""
    share = 1 / (1 + np.exp(-gate))
    return share * dy, share * (1 - share) * (dy * x).sum(1, keepdims=True)
