"""Matrices times numbers: y = s · x, and y = a · x + b · z."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def scaled(x: Array, scalar: float) -> Array:
    """x (rows, columns); what it makes of dy is dx, too."""
    return scalar * x


def weighted_sum(x: Array, z: Array, a: float, b: float) -> Array:
    """x and z (rows, columns); dx is ``scaled(dy, a)``."""
    return a * x + b * z
