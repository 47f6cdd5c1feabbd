"""Quantized tensors of GGUF files: the same numbers in this package's layout.

ggml stores a row as blocks of 32 to 256 weights together with their scales. Here they are
separated: codes of at most 4 bits become 4-bit codes, others 8-bit ones. A super-block's integer
scales, which its one or two float16 numbers multiply, are double quantization with blocks of 256
weights. Products and sums are exact in float32 up to the last rounding. Layouts: ggml-common.h and
ggml-quants.c of llama.cpp.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.quant.quantized_weight import (
    E8M0,
    IQ4_VALUES,
    NIBBLES,
    SIGNED,
    UNSIGNED,
    QuantizedWeight,
    pack_nibbles,
)
from qlora_wgpu.weight_format import WHOLE, WeightFormat

__all__ = ["GGML_FORMATS", "GgmlFormat", "repack_ggml"]

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Parts:
    """The parts of n stored blocks."""

    codes: UInt8Array  # (n, weights of a block)
    # (n, scales of a block), or with minima (n, scales of a block, 2): float32, or uint8 integers.
    scales: npt.NDArray[Any]
    nested: Float32Array | None = None  # factors of these, float32 (n, 1), or with minima (n, 2)


@dataclass(frozen=True, eq=False)
class GgmlFormat:
    """A quantized type of ggml."""

    block: int  # weights per block; a row consists of whole blocks
    block_bytes: int  # bytes of such a block
    form: WeightFormat  # the format used here
    take_apart: Callable[[UInt8Array], Parts]  # parts of uint8 (n, block_bytes)
    scale_map: Float32Array | None = None  # float32 (256,), the values of 8-bit scales

    @property
    def name(self) -> str:
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
    """Bytes shifted right by each of ``shifts``, ``group`` bytes at a time, in the codes' order."""
    grouped = columns.reshape(len(columns), -1, 1, group)
    steps = np.array(shifts, np.uint8)[:, None]
    return (grouped >> steps).reshape(len(columns), -1)


_BLOCK = 32

# ggml doubles E2M1's values and halves the scales; its zeros have no sign.
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _q4_0(blocks: UInt8Array) -> Parts:
    """w = d · (q - 8): d float16, 16 bytes of q."""
    return Parts(low_then_high(blocks[:, 2:], 16), halves(blocks[:, :2]))


def _q4_1(blocks: UInt8Array) -> Parts:
    """w = d · q + m: d and m float16, 16 bytes of q."""
    return Parts(low_then_high(blocks[:, 4:], 16), halves(blocks[:, :4])[:, None])


def _q5_0(blocks: UInt8Array) -> Parts:
    """w = d · (q - 16): d float16, 4 bytes of fifth bits, 16 of the others."""
    return Parts(_five_bits(blocks[:, 2:6], blocks[:, 6:]), halves(blocks[:, :2]))


def _q5_1(blocks: UInt8Array) -> Parts:
    """w = d · q + m: d and m float16, 4 bytes of fifth bits, 16 of the others."""
    return Parts(_five_bits(blocks[:, 4:8], blocks[:, 8:]), halves(blocks[:, :4])[:, None])


def _five_bits(high: UInt8Array, low: UInt8Array) -> UInt8Array:
    bits = np.unpackbits(high, axis=1, bitorder="little")
    return low_then_high(low, 16) | bits << np.uint8(4)


def _q8_0(blocks: UInt8Array) -> Parts:
    """w = d · q: d float16, 32 signed bytes."""
    return Parts(blocks[:, 2:], halves(blocks[:, :2]))


def _mxfp4(blocks: UInt8Array) -> Parts:
    """w = 2^(e - 128) · value: a byte of e, 16 of codes."""
    return Parts(low_then_high(blocks[:, 1:], 16), blocks[:, :1])


def _nvfp4(blocks: UInt8Array) -> Parts:
    """w = scale · value: 4 scales of 16 weights each, 8 bytes of codes for each of them."""
    return Parts(low_then_high(blocks[:, 4:], 8), blocks[:, :4])


def _unsigned_e4m3() -> Float32Array:
    """Half the values of NVFP4's scales, unsigned; ggml reads 127 as 0."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, mantissa * 2.0**-9, normal) / 2
    values[127] = 0
    return values.astype(np.float32)


def _format(
    name: str,
    quant_map: npt.NDArray[np.float32],
    blocksize: int = _BLOCK,
    nested_blocksize: int | None = None,
    *,
    has_minima: bool = False,
) -> WeightFormat:
    return WeightFormat(name, quant_map, blocksize, nested_blocksize, has_minima=has_minima)


_BLOCKS = (
    GgmlFormat(_BLOCK, 18, _format("Q4_0", NIBBLES - np.float32(8)), _q4_0),
    GgmlFormat(_BLOCK, 20, _format("Q4_1", NIBBLES, has_minima=True), _q4_1),
    GgmlFormat(_BLOCK, 22, _format("Q5_0", UNSIGNED - np.float32(16)), _q5_0),
    GgmlFormat(_BLOCK, 24, _format("Q5_1", UNSIGNED, has_minima=True), _q5_1),
    GgmlFormat(_BLOCK, 34, _format("Q8_0", SIGNED), _q8_0),
    GgmlFormat(_BLOCK, 18, _format("IQ4_NL", IQ4_VALUES), _q4_0),
    GgmlFormat(
        _BLOCK,
        17,
        _format("MXFP4", _DOUBLED, nested_blocksize=WHOLE),
        _mxfp4,
        E8M0 / np.float32(2),
    ),
    GgmlFormat(
        64, 36, _format("NVFP4", _DOUBLED, 16, nested_blocksize=WHOLE), _nvfp4, _unsigned_e4m3()
    ),
)


_SUPER_BLOCK = 256


def _q2_k(blocks: UInt8Array) -> Parts:
    """w = d · s · q - dmin · m, 16 weights a block: 16 bytes of s and m, 64 of q, d, dmin."""
    codes = bit_planes(blocks[:, 16:80], 32, range(0, 8, 2)) & np.uint8(3)
    scales = np.stack([blocks[:, :16] & np.uint8(15), blocks[:, :16] >> np.uint8(4)], axis=2)
    return Parts(codes, scales, _with_minimum(blocks[:, 80:]))


def _q3_k(blocks: UInt8Array) -> Parts:
    """w = d · (s - 32) · (q - 4), 16 weights a block: 32 bytes of third bits, 64, 12 of s, d."""
    low = bit_planes(blocks[:, 32:96], 32, range(0, 8, 2)) & np.uint8(3)
    high = bit_planes(blocks[:, :32], 32, range(8)) & np.uint8(1)
    four, two = blocks[:, 96:104], blocks[:, 104:108]
    scales = low_then_high(four, 8) | bit_planes(two, 4, range(0, 8, 2)) << np.uint8(4) & 0x30
    return Parts(low | high << np.uint8(2), scales, halves(blocks[:, 108:]))


def _q4_k(blocks: UInt8Array) -> Parts:
    """w = d · s · q - dmin · m, 32 weights a block: d, dmin, 12 bytes of s and m, 128 of q."""
    codes = low_then_high(blocks[:, 16:], 32)
    return Parts(codes, _six_bits(blocks[:, 4:16]), _with_minimum(blocks[:, :4]))


def _q5_k(blocks: UInt8Array) -> Parts:
    """As Q4_K, with 32 bytes of fifth bits before the others."""
    high = bit_planes(blocks[:, 16:48], 32, range(8)) & np.uint8(1)
    codes = low_then_high(blocks[:, 48:], 32) | high << np.uint8(4)
    return Parts(codes, _six_bits(blocks[:, 4:16]), _with_minimum(blocks[:, :4]))


def _q6_k(blocks: UInt8Array) -> Parts:
    """w = d · s · (q - 32), 16 weights a block: 128 bytes, 64 of upper bits, 16 signed s, d."""
    high = bit_planes(blocks[:, 128:192], 32, range(0, 8, 2)) & np.uint8(3)
    codes = low_then_high(blocks[:, :128], 64) | high << np.uint8(4)
    return Parts(codes, blocks[:, 192:208], halves(blocks[:, 208:]))


def _iq4_xs(blocks: UInt8Array) -> Parts:
    """w = d · (s - 32) · value, 32 weights a block: d, s in 2 and 4 bytes, 128 of codes."""
    upper = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    high = (upper >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & np.uint8(3)
    shifts = np.array([0, 4], np.uint8)
    low = (blocks[:, 4:8, None] >> shifts & np.uint8(15)).reshape(len(blocks), 8)
    return Parts(low_then_high(blocks[:, 8:], 16), low | high << np.uint8(4), halves(blocks[:, :2]))


def _with_minimum(columns: UInt8Array) -> Float32Array:
    """d and -dmin, since ggml subtracts minima."""
    return halves(columns) * np.array([1, -1], np.float32)


def _six_bits(columns: UInt8Array) -> UInt8Array:
    """Eight scales and eight minima of 6 bits in 12 bytes, as (n, 8, 2).

    The first four of each are the low 6 bits of bytes 0 to 3 and 4 to 7. The others have nibbles of
    bytes 8 to 11 (the high ones for minima) and their upper two bits in the upper bits of those
    bytes.
    """
    first, second, third = columns[:, :4], columns[:, 4:8], columns[:, 8:]
    six, two = np.uint8(63), np.uint8(2)
    scales = np.concatenate([first & six, third & 15 | first >> two & 48], axis=1)
    minima = np.concatenate([second & six, third >> np.uint8(4) | second >> two & 48], axis=1)
    return np.stack([scales, minima], axis=2)


def _super_format(
    name: str, values: Float32Array, blocksize: int, *, has_minima: bool = False
) -> WeightFormat:
    return WeightFormat(name, values, blocksize, _SUPER_BLOCK // blocksize, has_minima=has_minima)


_LESS_32 = UNSIGNED - np.float32(32)

_SUPER_BLOCKS = (
    GgmlFormat(
        _SUPER_BLOCK, 84, _super_format("Q2_K", NIBBLES, 16, has_minima=True), _q2_k, UNSIGNED
    ),
    GgmlFormat(
        _SUPER_BLOCK, 110, _super_format("Q3_K", NIBBLES - np.float32(4), 16), _q3_k, _LESS_32
    ),
    GgmlFormat(
        _SUPER_BLOCK, 144, _super_format("Q4_K", NIBBLES, 32, has_minima=True), _q4_k, UNSIGNED
    ),
    GgmlFormat(
        _SUPER_BLOCK, 176, _super_format("Q5_K", UNSIGNED, 32, has_minima=True), _q5_k, UNSIGNED
    ),
    GgmlFormat(_SUPER_BLOCK, 210, _super_format("Q6_K", _LESS_32, 16), _q6_k, SIGNED),
    GgmlFormat(_SUPER_BLOCK, 136, _super_format("IQ4_XS", IQ4_VALUES, 32), _iq4_xs, _LESS_32),
)


GGML_FORMATS: Mapping[str, GgmlFormat] = {form.name: form for form in (*_BLOCKS, *_SUPER_BLOCKS)}
"""The formats by ggml's names."""

_WEIGHTS = 1 << 20  # processed at a time


def repack_ggml(
    type_name: str, raw: npt.NDArray[np.uint8], shape: tuple[int, int], where: str
) -> QuantizedWeight:
    """Converts a matrix of a GGUF file.

    Args:
        type_name: A key of ``GGML_FORMATS``.
        raw: Its bytes as stored.
        shape: (out_features, in_features): GGUF's dimensions, the last first.
        where: The file and the tensor, for messages.
    """
    form = GGML_FORMATS[type_name]
    rows, columns = shape
    if columns % form.block:
        raise CheckpointError(
            f"{where} has rows of {columns} weights, expected a multiple of {form.block} for "
            f"{type_name}"
        )
    count = rows * columns // form.block
    if raw.size != count * form.block_bytes:
        raise CheckpointError(
            f"{where} has {raw.size} bytes, expected {count * form.block_bytes} for {rows} x "
            f"{columns} weights of {type_name}"
        )
    weight = _empty(form, shape)
    blocks = raw.reshape(count, form.block_bytes)
    step = max(_WEIGHTS // form.block, 1)
    for first in range(0, count, step):
        _put(form, weight, blocks[first : first + step], first)
    _check_finite(weight, where)
    return weight


def _empty(form: GgmlFormat, shape: tuple[int, int]) -> QuantizedWeight:
    stored = form.form
    pair = (2,) if stored.has_minima else ()
    blocks = stored.block_count(*shape)
    nested = None
    if stored.nested_blocksize is not None:
        length = stored.nested_entries(*shape) // stored.per_block
        nested = np.ones((length, *pair), np.float32)
    scale_dtype = np.float32 if nested is None else np.uint8
    return QuantizedWeight(
        shape=shape,
        format=stored,
        codes=np.empty(stored.code_bytes(*shape), np.uint8),
        absmax=np.empty((blocks, *pair), scale_dtype),
        nested_absmax=nested,
        nested_quant_map=form.scale_map,
        dtype="float16",
    )


def _put(
    form: GgmlFormat, weight: QuantizedWeight, blocks: npt.NDArray[np.uint8], first: int
) -> None:
    parts = form.take_apart(blocks)
    codes = pack_nibbles(parts.codes) if form.form.bits == 4 else parts.codes.reshape(-1)
    per_block = codes.size // len(blocks)
    weight.codes[first * per_block :][: codes.size] = codes
    scales = parts.scales.reshape(-1, *weight.absmax.shape[1:])
    weight.absmax[first * len(scales) // len(blocks) :][: len(scales)] = scales
    if parts.nested is not None:
        assert weight.nested_absmax is not None
        nested = parts.nested.reshape(-1, *weight.nested_absmax.shape[1:])
        weight.nested_absmax[first : first + len(nested)] = nested


def _check_finite(weight: QuantizedWeight, where: str) -> None:
    numbers = weight.absmax if weight.nested_absmax is None else weight.nested_absmax
    finite = bool(np.isfinite(numbers).all())
    if weight.nested_quant_map is not None and not np.isfinite(weight.nested_quant_map).all():
        finite &= bool(np.isfinite(weight.nested_quant_map)[weight.absmax].all())
    if not finite:
        raise CheckpointError(
            f"{where} contains a scale that is NaN or infinite: the model is damaged"
        )
