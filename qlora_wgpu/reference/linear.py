"""A frozen linear layer with LoRA and dropout: y = x·Wᵀ + bias + s·(mask∘x)·Aᵀ·Bᵀ."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def forward(x: Array, w: Array, bias: Array, a: Array, b: Array, s: float, mask: Array) -> Array:
    """x (rows, in), w (out, in), bias (out), a (r, in), b (out, r), mask (rows, in)."""
    return x @ w.T + bias + s * ((mask * x) @ a.T) @ b.T


def backward(
    dy: Array, x: Array, w: Array, a: Array, b: Array, s: float, mask: Array
) -> tuple[Array, Array, Array]:
    """Returns dx (rows, in), dA (r, in), dB (out, r)."""
    u = s * ((mask * x) @ a.T)
    du = s * (dy @ b)
    return dy @ w + mask * (du @ a), du.T @ (mask * x), dy.T @ u


def dropout_mask(
    rows: int, stride: int, columns: int, p: float, batch_key: int, module_key: int
) -> Array:
    """The mask of a module's input, bit for bit: 0 or 1 / (1 - p), (rows, columns)."""
    bits = random_bits(rows, stride, columns, batch_key, module_key)
    below = np.uint32(min(round((1 - p) * 2**32), 2**32 - 1))
    mask: Array = np.where(bits < below, np.float64(np.float32(1 / (1 - p))), 0.0)
    return mask


def random_bits(
    rows: int, stride: int, columns: int, batch_key: int, module_key: int
) -> npt.NDArray[np.uint32]:
    """Random bits of each element, (rows, columns).

    Element (row, column) has the index row · stride + column.
    """
    row, column = np.arange(rows, dtype=np.uint32), np.arange(columns, dtype=np.uint32)
    index: npt.NDArray[np.uint32] = row[:, None] * np.uint32(stride) + column
    return _mix(_mix(index + np.uint32(batch_key)) ^ np.uint32(module_key))


def _mix(v: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    v = (v ^ (v >> np.uint32(16))) * np.uint32(0x7FEB352D)
    v = (v ^ (v >> np.uint32(15))) * np.uint32(0x846CA68B)
    mixed: npt.NDArray[np.uint32] = v ^ (v >> np.uint32(16))
    return mixed
