"""bfloat16 in NumPy, as the 16 bits that files and devices hold."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt


def to_bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds float32 to bfloat16 (nearest, ties to even), as its 16 bits; NaN stays NaN."""
    with np.errstate(invalid="ignore"):  # NumPy warns of signalling NaN
        rounded = np.ascontiguousarray(array, np.float32).astype(ml_dtypes.bfloat16)
    return rounded.view(np.uint16).reshape(np.shape(array))  # NumPy gives a number a dimension


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Widens bfloat16's bits to float32, which holds every one of its numbers."""
    narrow = np.ascontiguousarray(bits, np.uint16).view(ml_dtypes.bfloat16)
    wide: npt.NDArray[np.float32] = narrow.astype(np.float32).reshape(np.shape(bits))
    return wide


def has_nonfinite(bits: npt.NDArray[np.uint16]) -> bool:
    """Whether any of bfloat16's bits are NaN's or an infinity's."""
    ones = np.uint16(0x7F80)
    return bool(((bits & ones) == ones).any())
