"""Double quantization: the absmax scales, themselves stored in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from qlora_wgpu.quant.codebooks import dynamic_quant_map
from qlora_wgpu.quant.float32_mean import float32_mean

NESTED_BLOCKSIZE = 256


@dataclass(frozen=True)
class QuantizedAbsmax:
    """Scales as bitsandbytes stores them with ``compress_statistics``.

    Attributes:
        codes: uint8 (n,), codes of ``dynamic_quant_map``.
        nested_absmax: float32 (ceil(n / 256),), the scale of each block of 256 scales.
        nested_offset: What was subtracted before: the mean of all scales.
    """

    codes: npt.NDArray[np.uint8]
    nested_absmax: npt.NDArray[np.float32]
    nested_offset: np.float32


def quantize_absmax(absmax: npt.NDArray[np.float32]) -> QuantizedAbsmax:
    """Quantizes scales to 8 bits, bit-exact to bitsandbytes 0.50 on a CPU.

    Args:
        absmax: float32 (n,), n >= 1, finite.
    """
    offset = float32_mean(absmax)
    centred = absmax - offset
    blocks = -(-absmax.size // NESTED_BLOCKSIZE)
    # Zeros change no block's absmax, and their codes are cut off again.
    padded = np.zeros((blocks, NESTED_BLOCKSIZE), np.float32)
    padded.reshape(-1)[: absmax.size] = centred
    nested_absmax = np.abs(padded).max(axis=1)
    nonzero = nested_absmax > 0
    # The reciprocal of a denormal overflows, and 0 · inf is NaN: in bitsandbytes as here.
    with np.errstate(over="ignore", invalid="ignore"):
        inverse = np.reciprocal(np.where(nonzero, nested_absmax, np.float32(1)))
        codes = nearest_codes(padded * inverse[:, None])
    codes[~nonzero] = 0
    return QuantizedAbsmax(codes.reshape(-1)[: absmax.size].copy(), nested_absmax, offset)


def dequantize_absmax(
    codes: npt.NDArray[np.uint8],
    nested_absmax: npt.NDArray[np.float32],
    nested_quant_map: npt.NDArray[np.float32],
    nested_offset: np.float32,
    nested_blocksize: int,
) -> npt.NDArray[np.float32]:
    """``nested_quant_map[code] · nested_absmax + nested_offset``, each step in float32."""
    scales = np.repeat(nested_absmax, nested_blocksize)[: codes.size]
    result: npt.NDArray[np.float32] = nested_quant_map[codes] * scales + nested_offset
    return result


def nearest_codes(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The codes of values in [-1, 1], through bitsandbytes' table of 65,536 points.

    The table is part of the format's bits: near a midpoint between two codes it rounds as its
    nearest point does, where an exact search would sometimes take the neighbour. NaN gets code 0.
    """
    one, half = np.float32(1), np.float32(0.5)
    clipped = np.clip(np.where(np.isnan(x), -one, x), -one, one)
    points = (clipped + one) * half * np.float32(65535) + half
    return _table()[points.astype(np.uint16)]


@cache
def _table() -> npt.NDArray[np.uint8]:
    quant_map = dynamic_quant_map()
    midpoints = np.float32(0.5) * (quant_map[:-1] + quant_map[1:])
    index = np.arange(65536, dtype=np.float32)
    points = np.float32(-1) + np.float32(2) * index / np.float32(65535)
    return np.searchsorted(midpoints, points, side="left").astype(np.uint8)
