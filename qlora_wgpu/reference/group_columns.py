"""Parts of every group of columns, like parts together, and the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


def _columns(groups: int, group: int, first: int, widths: Sequence[int]) -> Indices:
    """The columns that are taken, in their new order."""
    own = np.arange(groups * group).reshape(groups, group)
    ends = first + np.cumsum([0, *widths])
    parts = [own[:, a:b].reshape(-1) for a, b in pairwise(ends)]
    return np.concatenate(parts)


def forward(x: Array, groups: int, group: int, first: int, widths: Sequence[int]) -> Array:
    """x[:, columns] of (rows, groups · group)."""
    return x[:, _columns(groups, group, first, widths)]


def backward(
    dy: Array, columns: int, groups: int, group: int, first: int, widths: Sequence[int]
) -> Array:
    """dx of so many columns: dy where they were taken, zero elsewhere."""
    dx = np.zeros((len(dy), columns))
    dx[:, _columns(groups, group, first, widths)] = dy
    return dx
