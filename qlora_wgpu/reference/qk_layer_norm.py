"""LayerNorm of every head by itself, by a weight and a bias for each of its elements."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.reference import layer_norm

Array = npt.NDArray[np.float64]


def forward(x: Array, weight: Array, eps: float, bias: Array | None = None) -> Array:
    """x (rows, heads · head_dim), weight, bias (heads, head_dim), or (1, head_dim) for all heads.

    Returns (rows, heads · head_dim).
    """
    weights = _per_head(x, weight)
    added = np.zeros(1) if bias is None else _per_head(x, bias)
    y = layer_norm.forward(x.reshape(weights.shape), weights, added, eps)
    return y.reshape(x.shape)


def backward(dy: Array, x: Array, weight: Array, eps: float) -> Array:
    """Returns dx of all heads; see ``layer_norm.backward``."""
    weights = _per_head(x, weight)
    dx = layer_norm.backward(dy.reshape(weights.shape), x.reshape(weights.shape), weights, eps)
    return dx.reshape(x.shape)


def _per_head(x: Array, weight: Array) -> Array:
    """The weight of every head of every row, (rows · heads, head_dim)."""
    return np.tile(weight, (x.size // weight.size, 1))
