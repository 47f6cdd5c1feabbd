"""Quantized weights of safetensors: AWQ, GPTQ, compressed-tensors, 8-bit integers, FP8, FP4.

In files, the even weight of a byte is in the low nibble.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from qlora_wgpu.quant.quantized_weight import (
    E2M1,
    E4M3,
    E5M2,
    NIBBLES,
    SIGNED,
    UNSIGNED,
    QuantizedWeight,
    pack_nibbles,
)
from qlora_wgpu.weight_format import WHOLE, WeightFormat

UInt8Array = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

_PER_127 = float(np.float32(7.874015718698502e-3))  # bitsandbytes multiplies by 1 / 127

FP8_MAPS = {"F8_E4M3": E4M3, "F8_E5M2": E5M2}
"""The values of 8-bit floats, by safetensors' names of their types."""

INT8 = WeightFormat("LLM.int8", SIGNED, WHOLE, block_rows=1, factor=_PER_127)
"""w = q · scale of its row · (1 / 127), rounded after each product."""


def fp8_format(stored: str, tile: tuple[int, int]) -> WeightFormat:
    """w = q · scale of its tile."""
    return WeightFormat(
        f"FP8 {stored.removeprefix('F8_')}", FP8_MAPS[stored], tile[1], block_rows=tile[0]
    )


MXFP4 = WeightFormat("MXFP4", E2M1, 32, WHOLE)
"""w = value · 2^(e - 127), with an e for 32 weights of a row (OCP Microscaling Formats 1.0)."""
NVFP4 = WeightFormat("NVFP4", E2M1, 16, WHOLE)
"""w = value · scale, with an E4M3 scale for 16 weights of a row, times one of the tensor."""


def fp4_weight(
    form: WeightFormat, codes: UInt8Array, scales: UInt8Array, scale_map: Float32Array
) -> QuantizedWeight:
    """A matrix in MXFP4 or NVFP4, with (out_features, in_features / 2) bytes.

    Scales are codes, one per block, for the 256 values of ``scale_map``, which include their common
    factor.
    """
    return QuantizedWeight(
        shape=(codes.shape[0], 2 * codes.shape[1]),
        format=form,
        codes=_even_first(codes),
        absmax=scales.reshape(-1),
        nested_absmax=np.ones(1, np.float32),
        nested_quant_map=scale_map,
        dtype="bfloat16",
    )


def _even_first(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    flat = codes.reshape(-1)
    return flat << np.uint8(4) | flat >> np.uint8(4)


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word for each of its eight weights


def group_format(name: str, bits: int, columns: int, group_size: int) -> WeightFormat:
    group = WHOLE if group_size == -1 else group_size
    return WeightFormat(
        name,
        NIBBLES if bits == 4 else UNSIGNED,
        group,
        has_minima=True,
        block_rows=None if columns % group == 0 else 1,
    )


def grouped_weight(
    form: WeightFormat, codes: UInt8Array, zeros: UInt8Array, scales: Float32Array
) -> QuantizedWeight:
    """A matrix of AWQ or GPTQ: w = (q - zero) · scale.

    It is stored as q · scale + minimum with minimum = -zero · scale. Scales are float16 and
    integers short, so every product and sum is exact in float32. Codes are (in_features,
    out_features), zeros and scales (groups, out_features); a zero of 256, in GPTQ's 8 bits, does
    not occur.
    """
    minima = -zeros.astype(np.float32) * scales
    rows = np.ascontiguousarray(codes.T)
    return QuantizedWeight(
        shape=(rows.shape[0], rows.shape[1]),
        format=form,
        codes=pack_nibbles(rows) if form.bits == 4 else rows.reshape(-1),
        absmax=np.stack([scales.T, minima.T], axis=2).reshape(-1, 2),
        dtype="float16",
    )


def unpack_awq(words: Int32Array) -> UInt8Array:
    """Eight 4-bit integers of each word along the last axis, in AWQ's order."""
    return _unpacked(words, 4)[..., list(_AWQ_ORDER)].reshape(*words.shape[:-1], -1)


def unpack(words: Int32Array, bits: int) -> UInt8Array:
    """The integers of each run of words along the last axis, lowest bits first.

    If bits do not divide 32, integers cross words, 32 of them in ``bits`` words.
    """
    if 32 % bits == 0:
        return _unpacked(words, bits).reshape(*words.shape[:-1], -1)
    pad = [*[(0, 0)] * (words.ndim - 1), (0, -words.shape[-1] % bits)]
    runs = np.pad(words, pad).view(np.uint32).reshape(*words.shape[:-1], -1, bits)
    word, shift = np.divmod(np.arange(0, 32 * bits, bits), 32)
    following = runs[..., np.minimum(word + 1, bits - 1)].astype(np.uint64)
    both = following << np.uint64(32) | runs[..., word]
    integers = both >> shift.astype(np.uint64) & np.uint64(2**bits - 1)
    return integers.astype(np.uint8).reshape(*words.shape[:-1], -1)


def _unpacked(words: Int32Array, bits: int) -> UInt8Array:
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    shifted = words.view(np.uint32)[..., None] >> shifts
    return (shifted & np.uint32(2**bits - 1)).astype(np.uint8)


def packed_format(
    bits: int, tile: tuple[int, int], columns: int, *, has_zeros: bool
) -> WeightFormat:
    """The format of integers of few bits, stored unsigned: q + 2^(bits - 1).

    Zeros, if any, are stored with the same offset, which cancels.
    """
    codes = NIBBLES if bits <= 4 else UNSIGNED
    return _form(f"INT{bits}", codes if has_zeros else _centred(bits), tile, columns, has_zeros)


def byte_format(tile: tuple[int, int], columns: int, *, has_zeros: bool) -> WeightFormat:
    """The format of 8-bit integers in two's complement; arguments as for ``packed_format``."""
    return _form("INT8", SIGNED, tile, columns, has_zeros)


def scaled_weight(
    form: WeightFormat,
    codes: UInt8Array,
    scales: Float32Array,
    dtype: str,
    zeros: Float32Array | None = None,
) -> QuantizedWeight:
    """A matrix of codes (out_features, in_features) as stored, with a scale per block.

    Zeros, if the format has them, are integers in the codes' range, one per block.
    """
    absmax = scales.reshape(-1).astype(np.float32)
    if zeros is not None:
        absmax = np.stack([absmax, -zeros.reshape(-1)], axis=1)
    return QuantizedWeight(
        shape=(codes.shape[0], codes.shape[1]),
        format=form,
        codes=pack_nibbles(codes) if form.bits == 4 else codes.reshape(-1),
        absmax=absmax,
        dtype=dtype,
    )


@cache
def _centred(bits: int) -> Float32Array:
    values = (NIBBLES if bits <= 4 else UNSIGNED) - np.float32(2 ** (bits - 1))
    values.flags.writeable = False
    return values


def _form(
    name: str, codes: Float32Array, tile: tuple[int, int], columns: int, has_zeros: bool
) -> WeightFormat:
    rows, across = tile
    neighbours = rows == 1 and columns % across == 0  # supported by more kernels than tiles
    return WeightFormat(
        name,
        codes,
        across,
        has_minima=has_zeros,
        has_zeros=has_zeros,
        block_rows=None if neighbours else rows,
    )
