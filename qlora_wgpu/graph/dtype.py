"""Element types of tensors, and how host arrays become them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

ITEM_SIZE = {"float32": 4, "bfloat16": 2, "uint32": 4, "int32": 4, "uint8": 1}
ROW_UNIT = 8  # rows of matrices are padded with zeros to a multiple of this many elements


def padded(columns: int) -> int:
    """The number of elements that a row of ``columns`` elements takes."""
    return round_up(columns, ROW_UNIT)


def ceil_div(a: int, b: int) -> int:
    """The quotient rounded up."""
    return -(-a // b)


def round_up(number: int, unit: int) -> int:
    """The next multiple of ``unit``."""
    return ceil_div(number, unit) * unit


def pad_rows(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Pads the last axis of an array with zeros as a device matrix is padded."""
    extra = -array.shape[-1] % ROW_UNIT
    if not extra:
        return np.ascontiguousarray(array)
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, extra)])
