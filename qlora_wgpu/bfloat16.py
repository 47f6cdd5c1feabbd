"""bfloat16 in NumPy, as uint16 bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt


def to_bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds float32 to the bits of bfloat16 (nearest, ties to even); NaN stays NaN."""
    with np.errstate(invalid="ignore"):  # NumPy warns of signalling NaN
        rounded = np.ascontiguousarray(array, np.float32).astype(ml_dtypes.bfloat16)
    return rounded.view(np.uint16).reshape(np.shape(array))  # NumPy adds a dimension to scalars


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Converts the bits of bfloat16 to float32, exactly."""
    narrow = np.ascontiguousarray(bits, np.uint16).view(ml_dtypes.bfloat16)
    wide: npt.NDArray[np.float32] = narrow.astype(np.float32).reshape(np.shape(bits))
    return wide


def has_nonfinite(bits: npt.NDArray[np.uint16]) -> bool:
    """Whether any element is NaN or infinite."""
    ones = np.uint16(0x7F80)
    return bool(((bits & ones) == ones).any())
