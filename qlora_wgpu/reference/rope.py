"""Rotary position embedding in Hugging Face's half-split form."""

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
) -> Array:
    """x (rows, heads · head_dim), table (positions, rotary_dim / 2, 2) of (cos, sin)."""
    heads = x.reshape(len(x), -1, head_dim)
    half = rotary_dim // 2
    cos = table[positions, None, :, 0]
    sin = sign * table[positions, None, :, 1]
    first, second = heads[..., :half], heads[..., half:rotary_dim]
    y = heads.copy()
    y[..., :half] = first * cos - second * sin
    y[..., half:rotary_dim] = second * cos + first * sin
    return y.reshape(x.shape)


def backward(
    dy: Array, positions: npt.NDArray[np.integer], table: Array, head_dim: int, rotary_dim: int
) -> Array:
    """A rotation's transpose is its inverse."""
    return forward(dy, positions, table, head_dim, rotary_dim, sign=-1.0)
