"""Element types of tensors, and how host arrays become them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import from_bfloat16, to_bfloat16

ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "uint32": 4, "int32": 4, "uint8": 1}
ROW_UNIT = 8  # rows of matrices are padded with zeros to a multiple of this many elements


LARGEST_FLOAT16 = 65_504.0


def stored_bits(array: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Numbers as a tensor of a floating-point type holds them, rounded to nearest even."""
    if dtype == "float32":
        return array
    if dtype == "bfloat16":
        return to_bfloat16(array)
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float16).view(np.uint16)


def stored_floats(raw: memoryview | bytes, dtype: str) -> npt.NDArray[np.float32]:
    """The numbers that a tensor's bytes are, inverse of ``stored_bits``; of others the bits."""
    if dtype == "bfloat16":
        return from_bfloat16(np.frombuffer(raw, np.uint16))
    if dtype == "float16":
        return np.frombuffer(raw, np.float16).astype(np.float32)
    return np.frombuffer(raw, np.float32)


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
