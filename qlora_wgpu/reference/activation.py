"""Activation functions and their slopes, by Hugging Face's names."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_C = math.sqrt(2 / math.pi)
_QUICK = 1.702  # of Hugging Face's QuickGELUActivation


def forward(x: Array, activation: str) -> Array:
    """SiLU, ReLU, its square, sigmoid, GELU (``gelu``) or a form of it, of each element."""
    if activation == "silu":
        y: Array = x / (1 + np.exp(-x))
    elif activation == "quick_gelu":
        y = x / (1 + np.exp(-_QUICK * x))
    elif activation == "relu":
        y = np.maximum(x, 0.0)
    elif activation == "gelu":
        y = x * _normal_below(x)
    elif activation == "relu2":
        y = np.maximum(x, 0.0) ** 2
    elif activation == "sigmoid":
        y = 1 / (1 + np.exp(-x))
    else:
        y = 0.5 * x * (1 + np.tanh(_C * (x + 0.044715 * x**3)))
    return y


def slope(x: Array, activation: str) -> Array:
    """The derivative of ``forward``."""
    if activation == "silu":
        s = 1 / (1 + np.exp(-x))
        derivative: Array = s * (1 + x * (1 - s))
    elif activation == "quick_gelu":
        s = 1 / (1 + np.exp(-_QUICK * x))
        derivative = s * (1 + _QUICK * x * (1 - s))
    elif activation == "relu":
        derivative = np.where(x > 0, 1.0, 0.0)
    elif activation == "gelu":
        derivative = _normal_below(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    elif activation == "relu2":
        derivative = 2 * np.maximum(x, 0.0)
    elif activation == "sigmoid":
        derivative = np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))) ** 2
    else:
        t = np.tanh(_C * (x + 0.044715 * x**3))
        derivative = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _C * (1 + 3 * 0.044715 * x * x)
    return derivative


def _normal_below(x: Array) -> Array:
    halves = [0.5 * math.erfc(-v / math.sqrt(2)) for v in x.reshape(-1)]
    return np.array(halves).reshape(x.shape)
