"""gpt-oss's gated unit: y = (u + 1) · x · σ(alpha · x), with gate and up clamped to x and u."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def forward(gate: Array, up: Array, limit: float, alpha: float) -> Array:
    """gate and up (rows, columns)."""
    x = np.minimum(gate, limit)
    y: Array = (np.clip(up, -limit, limit) + 1) * x / (1 + np.exp(-alpha * x))
    return y


def backward(dy: Array, gate: Array, up: Array, limit: float, alpha: float) -> tuple[Array, Array]:
    """Returns dgate and dup, zero where a clamp cuts."""
    x = np.minimum(gate, limit)
    s = 1 / (1 + np.exp(-alpha * x))
    dgate = dy * (np.clip(up, -limit, limit) + 1) * s * (1 + alpha * x * (1 - s))
    return dgate * (gate <= limit), dy * x * s * (np.abs(up) <= limit)
