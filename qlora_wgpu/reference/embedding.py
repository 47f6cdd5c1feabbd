"""Rows of a matrix, with NEFTune's noise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.reference.linear import random_bits

Array = npt.NDArray[np.float64]


def noise(
    rows: int, stride: int, columns: int, most: float, batch_key: int, module_key: int
) -> Array:
    """What is added to (rows, columns): uniform in ±most, bit for bit the device's draws."""
    bits = random_bits(rows, stride, columns, batch_key, module_key)
    share = (bits >> np.uint32(8)).astype(np.float64) * (2.0 / 2**24)
    drawn: Array = most * (share - 1.0)
    return drawn
