"""The order of rows for a rotation of neighbours, as llama.cpp stores q and k of some models."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", bound="np.generic[Any]")


def to_pairs(array: npt.NDArray[Number], heads: int) -> npt.NDArray[Number]:
    """Rows of each head, from halves that rotate together to neighbours.

    Args:
        array: (rows, ...), a matrix, a bias or the numbers of rows.
        heads: How many heads the rows are of; 0 where their order stays.
    """
    if not heads:
        return array
    halves = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
