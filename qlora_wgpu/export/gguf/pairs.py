"""The order of rows for a rotation of neighbours, as llama.cpp stores q and k of some models."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


def to_pairs(array: FloatArray, heads: int) -> FloatArray:
    """Rows of each head, from halves that rotate together to neighbours.

    Args:
        array: (rows, ...), a matrix or a bias.
        heads: How many heads the rows are of; 0 where their order stays.
    """
    if not heads:
        return array
    halves = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
