"""4-bit NormalFloat (NF4) in NumPy, bit-exact to bitsandbytes' layout.

Formula, per block of consecutive weights (row-major, crossing rows; the last may be short):
absmax = max |w|; code = nearest quant_map value to w / absmax; w ≈ quant_map[code] · absmax.
"""

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import CheckpointError, ConfigError, ShapeError
from qlora_wgpu.quant.quantized_weight import (
    NESTED_BLOCKSIZE,
    NF4_QUANT_MAP,
    QuantizedAbsmax,
    QuantizedWeight,
    dynamic_quant_map,
    quantize_absmax,
)
from qlora_wgpu.weight_format import WeightFormat

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""The block sizes (weights per scale) of bitsandbytes."""

_CHUNK = 65536  # weights processed at a time, so that temporaries stay in the cache
_SMALLEST_ABSMAX = np.float32(1e-38)  # bitsandbytes' minimum divisor, so zeros give no NaN
_BOUNDS = (NF4_QUANT_MAP[:-1] + NF4_QUANT_MAP[1:]) / np.float32(2)

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]


def quantize_nf4(
    weight: npt.NDArray[np.float32],
    blocksize: int = 64,
    double_quant: bool = True,
    dtype: str = "float32",
) -> QuantizedWeight:
    """Quantizes a weight matrix exactly as bitsandbytes 0.50 does on a CPU.

    A value half-way between two codes gets the lower one. Temporary memory is bounded for
    matrices of any size (a non-contiguous one is copied first).

    Args:
        weight: float32 (out_features, in_features).
        blocksize: Weights per scale, one of ``BLOCKSIZES``.
        double_quant: Whether to store the scales in 8 bits as well.
        dtype: The type recorded as the weights' own; it changes no value.
    """
    if blocksize not in BLOCKSIZES:
        allowed = ", ".join(map(str, BLOCKSIZES))
        raise ConfigError(f"quant.blocksize must be one of {allowed}, got {blocksize}")
    if weight.ndim != 2 or weight.size == 0 or weight.dtype != np.float32:
        raise ShapeError(
            f"NF4 quantization requires a float32 matrix, got {weight.dtype} {weight.shape}"
        )
    codes, absmax = _quantize_blocks(np.ascontiguousarray(weight).reshape(-1), blocksize)
    if not np.isfinite(absmax).all():
        raise CheckpointError("cannot quantize a weight that is NaN or infinite")
    shape, form = (weight.shape[0], weight.shape[1]), nf4_format(blocksize, double_quant)
    if not double_quant:
        return QuantizedWeight(shape, form, codes, absmax, dtype=dtype)
    nested = _quantize_finite(absmax)
    return QuantizedWeight(
        shape,
        form,
        codes,
        nested.codes,
        nested.nested_absmax,
        dynamic_quant_map(),
        float(nested.nested_offset),
        dtype,
    )


def nf4_format(blocksize: int, double_quant: bool) -> WeightFormat:
    """NF4 as in bitsandbytes."""
    nested = NESTED_BLOCKSIZE if double_quant else None
    return WeightFormat("NF4", NF4_QUANT_MAP, blocksize, nested, has_offset=double_quant)


def _quantize_finite(absmax: Float32Array) -> QuantizedAbsmax:
    with np.errstate(over="ignore", invalid="ignore"):
        nested = quantize_absmax(absmax)
    if not np.isfinite(nested.nested_offset):
        raise CheckpointError(
            "weights are too large for double quantization: the mean of their block maxima "
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
        with np.errstate(invalid="ignore"):  # infinite weights, which the caller refuses
            np.multiply(blocks, inverse[:, None], out=scaled)
        codes[start // 2 : stop // 2] = _pack(scaled.reshape(-1))
    if whole < flat.size:
        # bitsandbytes treats a short last block differently: the minimum absmax is stored, and the
        # weights are divided by it instead of multiplied by its reciprocal.
        rest = flat[whole:]
        absmax[-1] = np.maximum(np.abs(rest).max(), _SMALLEST_ABSMAX)
        with np.errstate(invalid="ignore"):
            codes[whole // 2 :] = _pack(np.pad(rest / absmax[-1], (0, rest.size % 2)))
    return codes, absmax


def _pack(scaled: Float32Array) -> UInt8Array:
    """Codes of an even number of values in [-1, 1], two per byte.

    A code is the number of bounds below the value. Fifteen vectorized comparisons are exact, and
    faster in NumPy than any table or search.
    """
    codes = np.zeros(scaled.size, np.uint8)
    above = np.empty(scaled.size, np.bool_)
    for bound in _BOUNDS:
        np.greater(scaled, bound, out=above)
        np.add(codes, above.view(np.uint8), out=codes)
    return codes[0::2] << np.uint8(4) | codes[1::2]
