"""DoRA's scaling of each output: y = m / ‖W + s·B·A‖ ⊙ z, the norm a constant in the backward."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def norm(w: Array, a: Array, b: Array, s: float) -> Array:
    """‖w + s·b·a‖ of each row: w (out, in), a (r, in), b (out, r)."""
    lengths: Array = np.sqrt(np.sum((w + s * (b @ a)) ** 2, axis=1))
    return lengths


def forward(z: Array, m: Array, norms: Array) -> Array:
    """z (rows, out), m and norms (out)."""
    return z * (m / norms)


def backward(dy: Array, z: Array, m: Array, norms: Array) -> tuple[Array, Array]:
    """Returns dz (rows, out), dm (out)."""
    return dy * (m / norms), np.sum(dy * z, axis=0) / norms
