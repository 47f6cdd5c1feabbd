"""What is known of a quantized type of ggml."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.weight_format import WeightFormat

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Parts:
    """What n stored blocks hold.

    Attributes:
        codes: (n, weights of a block), a code each.
        scales: (n, scales of a block), or with minima (n, scales of a block, 2): float32, or uint8
            codes of integers.
        nested: What those are multiplied by, float32 (n, 1), or with minima (n, 2).
    """

    codes: UInt8Array
    scales: npt.NDArray[Any]
    nested: Float32Array | None = None


@dataclass(frozen=True, eq=False)
class GgmlFormat:
    """A quantized type of ggml.

    Attributes:
        block: Weights that are stored together; a row is a whole number of blocks.
        block_bytes: Bytes of such a block.
        form: The form in which they are kept here.
        take_apart: Parts of uint8 (n, block_bytes).
        scale_map: float32 (256,), what scales in 8 bits stand for.
    """

    block: int
    block_bytes: int
    form: WeightFormat
    take_apart: Callable[[UInt8Array], Parts]
    scale_map: Float32Array | None = None

    @property
    def name(self) -> str:
        """ggml's name of it."""
        return self.form.name


def halves(columns: UInt8Array) -> Float32Array:
    """Little-endian float16 numbers, (n, 2 · k) bytes to float32 (n, k)."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def low_then_high(columns: UInt8Array, group: int) -> UInt8Array:
    """The low nibbles of each ``group`` bytes, then their high ones: (n, 2 · bytes)."""
    grouped = columns.reshape(len(columns), -1, 1, group)
    shifts = np.array([0, 4], np.uint8)[:, None]
    return ((grouped >> shifts) & np.uint8(15)).reshape(len(columns), -1)


def bit_planes(columns: UInt8Array, group: int, shifts: range) -> UInt8Array:
    """Bytes shifted right by each of ``shifts``, ``group`` bytes at a time, as codes follow."""
    grouped = columns.reshape(len(columns), -1, 1, group)
    steps = np.array(shifts, np.uint8)[:, None]
    return (grouped >> steps).reshape(len(columns), -1)
