"""Heads put together from columns of other matrices: of each head's group, or of one for all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Part = tuple[Array, int, int, int]
"""A matrix, its columns for each head (0: all heads have the same), the first taken, how many."""


def forward(parts: Sequence[Part], heads: int, head_dim: int) -> Array:
    """y (rows, heads · head_dim), zero behind the parts of each head."""
    y = np.zeros((len(parts[0][0]), heads, head_dim))
    at = 0
    for x, group, first, width in parts:
        whole = x.reshape(len(x), heads, group) if group else x[:, None]
        y[:, :, at : at + width] = whole[:, :, first : first + width]
        at += width
    return y.reshape(len(y), -1)


def backward(dy: Array, parts: Sequence[Part], heads: int, head_dim: int) -> list[Array]:
    """The gradient of each part's matrix."""
    own, at, gradients = dy.reshape(len(dy), heads, head_dim), 0, []
    for x, group, first, width in parts:
        taken, dx = own[:, :, at : at + width], np.zeros_like(x)
        if group:
            dx.reshape(len(x), heads, group)[:, :, first : first + width] = taken
        else:
            dx[:, first : first + width] = taken.sum(1)
        gradients.append(dx)
        at += width
    return gradients
