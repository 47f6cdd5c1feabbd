"""Linear layers with LoRA, dropout and DoRA, and the device's random bits."""

import numpy as np
import numpy.typing as npt

from qlora_wgpu.reference.tape import Array

Bits = npt.NDArray[np.uint32]


def linear(
    x: Array, w: Array, a: Array, b: Array, s: float, mask: Array, bias: Array | float = 0.0
) -> Array:
    """x·Wᵀ + bias + s·(mask∘x)·Aᵀ·Bᵀ.

    x and mask (rows, in), w (out, in), a (r, in), b (out, r), bias (out).
    """
    return x @ w.T + bias + s * ((mask * x) @ a.T) @ b.T


def dora_norm(w: Array, a: Array, b: Array, s: float) -> Array:
    """‖w + s·b·a‖ per row: w (out, in), a (r, in), b (out, r)."""
    return np.sqrt(np.sum((w + s * (b @ a)) ** 2, axis=1))


def dora(z: Array, m: Array, norms: Array) -> Array:
    """z (rows, out) scaled by m / norms (out); the norms are constants."""
    return z * (m / norms)


def dropout_parts(x: Array, mask: Array) -> tuple[Array, Array]:
    """mask ⊙ x and (1 - mask) ⊙ x, of x and mask (rows, columns)."""
    return mask * x, (1 - mask) * x


def dropout_mask(
    rows: int, stride: int, columns: int, p: float, batch_key: int, module_key: int
) -> Array:
    """The bit-exact mask of a module's input: 0 or 1 / (1 - p), (rows, columns)."""
    bits = random_bits(rows, stride, columns, batch_key, module_key)
    below = np.uint32(min(round((1 - p) * 2**32), 2**32 - 1))
    return np.where(bits < below, np.float64(np.float32(1 / (1 - p))), 0.0)


def embedding_noise(
    rows: int, stride: int, columns: int, most: float, batch_key: int, module_key: int
) -> Array:
    """NEFTune's noise (rows, columns): uniform in ±most, bit-identical to the device's."""
    bits = random_bits(rows, stride, columns, batch_key, module_key)
    share = (bits >> np.uint32(8)).astype(np.float64) * (2.0 / 2**24)
    return most * (share - 1.0)


def random_bits(
    rows: int, stride: int, columns: int, batch_key: int, module_key: int
) -> npt.NDArray[np.uint32]:
    """Random bits (rows, columns); the index of an element is row · stride + column."""
    row, column = np.arange(rows, dtype=np.uint32), np.arange(columns, dtype=np.uint32)
    index: Bits = row[:, None] * np.uint32(stride) + column
    return mixed(mixed(index + np.uint32(batch_key)) ^ np.uint32(module_key))


def mixed(v: Bits) -> Bits:
    v = (v ^ (v >> np.uint32(16))) * np.uint32(0x7FEB352D)
    v = (v ^ (v >> np.uint32(15))) * np.uint32(0x846CA68B)
    result: Bits = v ^ (v >> np.uint32(16))
    return result
