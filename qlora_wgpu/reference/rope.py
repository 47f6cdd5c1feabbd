"""Rotary position embedding half-split as in Llama or interleaved."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def forward(
    x: Array,
    positions: npt.NDArray[np.integer],
    table: Array,
    head_dim: int,
    rotary_dim: int,
    sign: float = 1.0,
    interleaved: bool = False,
) -> Array:
    """x (rows, heads · head_dim), table (positions, rotary_dim / 2, 2) of (cos, sin)."""
    heads = x.reshape(len(x), -1, head_dim)
    half = rotary_dim // 2
    cos = table[positions, None, :, 0]
    sin = sign * table[positions, None, :, 1]
    low, high = slice(0, half), slice(half, rotary_dim)
    if interleaved:
        low, high = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    first, second = heads[..., low], heads[..., high]
    y = heads.copy()
    y[..., low] = first * cos - second * sin
    y[..., high] = second * cos + first * sin
    return y.reshape(x.shape)


def backward(
    dy: Array,
    positions: npt.NDArray[np.integer],
    table: Array,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool = False,
) -> Array:
    """A rotation's transpose is its inverse."""
    return forward(dy, positions, table, head_dim, rotary_dim, -1.0, interleaved)
