"""Gated linear units: y = act(gate) · up, with SiLU or GELU in its tanh form."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_C = math.sqrt(2 / math.pi)


def forward(gate: Array, up: Array, activation: str) -> Array:
    """gate and up (rows, columns)."""
    return _act(gate, activation) * up


def backward(dy: Array, gate: Array, up: Array, activation: str) -> tuple[Array, Array]:
    """Returns dgate and dup."""
    return dy * up * _slope(gate, activation), dy * _act(gate, activation)


def _act(x: Array, activation: str) -> Array:
    if activation == "silu":
        y: Array = x / (1 + np.exp(-x))
    else:
        y = 0.5 * x * (1 + np.tanh(_C * (x + 0.044715 * x**3)))
    return y


def _slope(x: Array, activation: str) -> Array:
    if activation == "silu":
        s = 1 / (1 + np.exp(-x))
        slope: Array = s * (1 + x * (1 - s))
    else:
        t = np.tanh(_C * (x + 0.044715 * x**3))
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _C * (1 + 3 * 0.044715 * x * x)
    return slope
