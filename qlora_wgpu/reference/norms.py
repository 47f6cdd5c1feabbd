"""Norms of rows, and of each head of a row by itself."""

import numpy as np

from qlora_wgpu.reference.pointwise import activation
from qlora_wgpu.reference.tape import Array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x · rstd · weight, rstd = 1 / √(mean(x²) + eps), over each row of x (rows, columns)."""
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps) * weight


def layer_norm(x: Array, weight: Array, eps: float, bias: Array | float = 0.0) -> Array:
    """(x - mean) / √(variance + eps) · weight + bias, over each row of x (rows, columns)."""
    centred = x - np.mean(x, axis=1, keepdims=True)
    variance = np.mean(centred * centred, axis=1, keepdims=True)
    return centred / np.sqrt(variance + eps) * weight + bias


def qk_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm of each head of x (rows, heads · head_dim), weight (head_dim)."""
    return rms_norm(x.reshape(-1, weight.size), weight, eps).reshape(x.shape)


def qk_layer_norm(x: Array, weight: Array, eps: float, bias: Array | None = None) -> Array:
    """LayerNorm of each head of x (rows, heads · head_dim).

    Weight and bias are (heads, head_dim), or (1, head_dim) for all heads.
    """
    weights = np.tile(weight, (x.size // weight.size, 1))
    biases = 0.0 if bias is None else np.tile(bias, (x.size // bias.size, 1))
    return layer_norm(x.reshape(weights.shape), weights, eps, biases).reshape(x.shape)


def gated_rms_norm(x: Array, z: Array, weight: Array, eps: float) -> Array:
    """RMSNorm of each head times silu(z); x and z (rows, heads · head_dim), weight (head_dim)."""
    return qk_norm(x, weight, eps) * activation(z, "silu")
