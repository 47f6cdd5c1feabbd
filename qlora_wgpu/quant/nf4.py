"""4-bit NormalFloat (NF4) in NumPy, bit-exact to bitsandbytes' layout.

Formula, per block of consecutive weights (row-major, crossing rows; the last may be short):
absmax = max |w|; code = nearest quant_map value to w / absmax; w ≈ quant_map[code] · absmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import CheckpointError, ConfigError, ShapeError
from qlora_wgpu.quant.codebooks import NF4_QUANT_MAP, dynamic_quant_map
from qlora_wgpu.quant.double_quant import (
    NESTED_BLOCKSIZE,
    QuantizedAbsmax,
    dequantize_absmax,
    quantize_absmax,
)

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Weights per scale that bitsandbytes knows."""

_CHUNK = 65536  # weights worked on at a time: temporaries that stay in the processor's cache
_SMALLEST_ABSMAX = np.float32(1e-38)  # bitsandbytes divides by no less, so zeros give no NaN
_BOUNDS = (NF4_QUANT_MAP[:-1] + NF4_QUANT_MAP[1:]) / np.float32(2)

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class NF4Tensor:
    """A quantized weight matrix with n = out_features · in_features weights in nb blocks.

    Attributes:
        shape: (out_features, in_features).
        codes: uint8 (ceil(n / 2),), two 4-bit codes a byte, the even weight in the high nibble.
        quant_map: float32 (16,), the value of each code.
        blocksize: Weights per block.
        absmax: Scale of each block: float32 (nb,), or uint8 codes if doubly quantized.
        nested_absmax: float32 (ceil(nb / nested_blocksize),), or None if not doubly quantized.
        nested_quant_map: float32 (256,), the value of each absmax code, or None likewise.
        nested_offset: A float32 number added to each dequantized scale.
        nested_blocksize: Scales per nested block.
        dtype: Type of the weights before, as PyTorch calls it, for example "bfloat16".
    """

    shape: tuple[int, int]
    codes: UInt8Array
    quant_map: Float32Array
    blocksize: int
    absmax: Float32Array | UInt8Array
    nested_absmax: Float32Array | None = None
    nested_quant_map: Float32Array | None = None
    nested_offset: float = 0.0
    nested_blocksize: int = NESTED_BLOCKSIZE
    dtype: str = "float32"

    @property
    def double_quant(self) -> bool:
        """Whether the scales are stored in 8 bits."""
        return self.nested_absmax is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.codes, self.quant_map, self.absmax)
        nested = (self.nested_absmax, self.nested_quant_map)
        return sum(a.nbytes for a in arrays) + sum(a.nbytes for a in nested if a is not None)

    def block_scales(self) -> Float32Array:
        """The absmax of each block, dequantized: float32 (nb,)."""
        if self.nested_absmax is None or self.nested_quant_map is None:
            return self.absmax.astype(np.float32)
        return dequantize_absmax(
            self.absmax.astype(np.uint8, copy=False),
            self.nested_absmax,
            self.nested_quant_map,
            np.float32(self.nested_offset),
            self.nested_blocksize,
        )

    def dequantize(self) -> Float32Array:
        """The weights, ``quant_map[code] · scale`` in float32 (not cast to ``dtype``).

        Returns:
            float32 (out_features, in_features).
        """
        n = self.shape[0] * self.shape[1]
        weight = np.empty(2 * self.codes.size, np.float32)
        _decode(self.codes, self.quant_map, weight)
        weight = weight[:n]
        scales = self.block_scales()
        whole = n // self.blocksize * self.blocksize
        weight[:whole].reshape(-1, self.blocksize)[:] *= scales[: n // self.blocksize, None]
        weight[whole:] *= scales[-1]
        return weight.reshape(self.shape)


def quantize_nf4(
    weight: npt.NDArray[np.float32],
    blocksize: int = 64,
    double_quant: bool = True,
    dtype: str = "float32",
) -> NF4Tensor:
    """Quantizes a weight matrix exactly as bitsandbytes 0.50 does on a CPU.

    A value half-way between two codes gets the lower one. Temporary memory is bounded, whatever
    the size of the matrix (a non-contiguous one is copied first).

    Args:
        weight: float32 (out_features, in_features).
        blocksize: Weights per scale, one of ``BLOCKSIZES``.
        double_quant: Whether to store the scales in 8 bits as well.
        dtype: The type to note as the weights' own; it changes no number.

    Raises:
        CheckpointError: If a weight is NaN or infinite, or too large for float32 scales.
        ConfigError: If bitsandbytes has no such block size.
        ShapeError: If the weight is no float32 matrix, or empty.
    """
    if blocksize not in BLOCKSIZES:
        allowed = ", ".join(map(str, BLOCKSIZES))
        raise ConfigError(f"quant.blocksize is {blocksize}, but must be one of {allowed}")
    if weight.ndim != 2 or weight.size == 0 or weight.dtype != np.float32:
        raise ShapeError(
            f"only a float32 matrix can be quantized to NF4, not {weight.dtype} {weight.shape}"
        )
    codes, absmax = _quantize_blocks(np.ascontiguousarray(weight).reshape(-1), blocksize)
    if not np.isfinite(absmax).all():
        raise CheckpointError("a weight that should be quantized is NaN or infinite")
    shape = (weight.shape[0], weight.shape[1])
    if not double_quant:
        return NF4Tensor(shape, codes, NF4_QUANT_MAP, blocksize, absmax, dtype=dtype)
    nested = _quantize_finite(absmax)
    return NF4Tensor(
        shape,
        codes,
        NF4_QUANT_MAP,
        blocksize,
        nested.codes,
        nested.nested_absmax,
        dynamic_quant_map(),
        float(nested.nested_offset),
        dtype=dtype,
    )


def _quantize_finite(absmax: Float32Array) -> QuantizedAbsmax:
    with np.errstate(over="ignore", invalid="ignore"):
        nested = quantize_absmax(absmax)
    if not np.isfinite(nested.nested_offset):
        raise CheckpointError(
            "weights are too large to be quantized doubly: the mean of their block maxima "
            "overflows float32; set quant.double_quant to false"
        )
    return nested


def _quantize_blocks(flat: Float32Array, blocksize: int) -> tuple[UInt8Array, Float32Array]:
    codes = np.empty(-(-flat.size // 2), np.uint8)
    absmax = np.empty(-(-flat.size // blocksize), np.float32)
    whole = flat.size // blocksize * blocksize
    for start in range(0, whole, _CHUNK):
        stop = min(start + _CHUNK, whole)
        blocks = flat[start:stop].reshape(-1, blocksize)
        scaled = np.abs(blocks)
        largest = scaled.max(axis=1)
        absmax[start // blocksize : stop // blocksize] = largest
        inverse = np.float32(1) / np.maximum(largest, _SMALLEST_ABSMAX)
        with np.errstate(invalid="ignore"):  # infinite weights, refused by the caller
            np.multiply(blocks, inverse[:, None], out=scaled)
        codes[start // 2 : stop // 2] = _pack(scaled.reshape(-1))
    if whole < flat.size:
        # bitsandbytes treats a short last block otherwise: the smallest absmax is stored, and the
        # weights are divided by it instead of multiplied by its reciprocal.
        rest = flat[whole:]
        absmax[-1] = np.maximum(np.abs(rest).max(), _SMALLEST_ABSMAX)
        with np.errstate(invalid="ignore"):
            codes[whole // 2 :] = _pack(np.pad(rest / absmax[-1], (0, rest.size % 2)))
    return codes, absmax


def _pack(scaled: Float32Array) -> UInt8Array:
    """Codes of an even count of values in [-1, 1], two a byte.

    A code is the number of bounds below the value. Fifteen vectorized comparisons are faster in
    NumPy than any table or search, and exact.
    """
    codes = np.zeros(scaled.size, np.uint8)
    above = np.empty(scaled.size, np.bool_)
    for bound in _BOUNDS:
        np.greater(scaled, bound, out=above)
        np.add(codes, above.view(np.uint8), out=codes)
    return codes[0::2] << np.uint8(4) | codes[1::2]


def _decode(codes: UInt8Array, quant_map: Float32Array, out: Float32Array) -> None:
    """Writes the two values of each byte, looked up as one pair of 8 bytes."""
    byte = np.arange(256)
    pairs = np.stack([quant_map[byte >> 4], quant_map[byte & 15]], axis=1).view(np.uint64)[:, 0]
    target = out.view(np.uint64)
    for start in range(0, codes.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        np.take(pairs, codes[chunk], out=target[chunk], mode="clip")
