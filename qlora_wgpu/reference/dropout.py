"""What dropout keeps of a layer's input, and what it leaves; the two together are the input."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def parts(x: Array, mask: Array) -> tuple[Array, Array]:
    """mask ⊙ x and (1 - mask) ⊙ x, of x and mask (rows, columns)."""
    return mask * x, (1 - mask) * x


def backward(dkept: Array, drest: Array, mask: Array) -> Array:
    """Returns dx (rows, columns)."""
    return mask * dkept + (1 - mask) * drest
