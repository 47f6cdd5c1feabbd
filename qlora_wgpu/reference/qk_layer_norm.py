"""LayerNorm of every head by itself, without a bias, by a weight for each of its elements."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.reference import layer_norm

Array = npt.NDArray[np.float64]


def forward(x: Array, weight: Array, eps: float) -> Array:
    """x (rows, heads · head_dim), weight (heads, head_dim); returns (rows, heads · head_dim)."""
    weights = _per_head(x, weight)
    y = layer_norm.forward(x.reshape(weights.shape), weights, np.zeros(1), eps)
    return y.reshape(x.shape)


def backward(dy: Array, x: Array, weight: Array, eps: float) -> Array:
    """Returns dx of all heads; see ``layer_norm.backward``."""
    weights = _per_head(x, weight)
    dx = layer_norm.backward(dy.reshape(weights.shape), x.reshape(weights.shape), weights, eps)
    return dx.reshape(x.shape)


def _per_head(x: Array, weight: Array) -> Array:
    """The weight of every head of every row, (rows · heads, head_dim)."""
    return np.tile(weight, (len(x), 1))
