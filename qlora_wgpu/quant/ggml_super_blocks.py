"""ggml's types of 256 weights with small integers for scales: Q2_K to Q6_K and IQ4_XS.

A super-block's blocks have integers, which its one or two float16 numbers multiply: that is double
quantization with blocks of 256 weights. Products and sums of them are exact in float32 up to the
last rounding. Layouts and formulas: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

import numpy as np

from qlora_wgpu.quant.ggml_format import (
    Float32Array,
    GgmlFormat,
    Parts,
    UInt8Array,
    bit_planes,
    halves,
    low_then_high,
)
from qlora_wgpu.quant.number_formats import IQ4_VALUES, NIBBLES, SIGNED, UNSIGNED
from qlora_wgpu.weight_format import WeightFormat

_BLOCK = 256


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
    """d and -dmin: what is subtracted is a minimum with the other sign."""
    return halves(columns) * np.array([1, -1], np.float32)


def _six_bits(columns: UInt8Array) -> UInt8Array:
    """Eight scales and eight minima of 6 bits in 12 bytes, as (n, 8, 2).

    The lower four of each have the low 6 bits of bytes 0 to 3 and 4 to 7. The others have nibbles
    of bytes 8 to 11, the minima's the high ones, and their upper bits in those bytes' last two.
    """
    first, second, third = columns[:, :4], columns[:, 4:8], columns[:, 8:]
    six, two = np.uint8(63), np.uint8(2)
    scales = np.concatenate([first & six, third & 15 | first >> two & 48], axis=1)
    minima = np.concatenate([second & six, third >> np.uint8(4) | second >> two & 48], axis=1)
    return np.stack([scales, minima], axis=2)


def _format(
    name: str, values: Float32Array, blocksize: int, *, has_minima: bool = False
) -> WeightFormat:
    return WeightFormat(name, values, blocksize, _BLOCK // blocksize, has_minima=has_minima)


_LESS_32 = UNSIGNED - np.float32(32)

FORMATS = (
    GgmlFormat(_BLOCK, 84, _format("Q2_K", NIBBLES, 16, has_minima=True), _q2_k, UNSIGNED),
    GgmlFormat(_BLOCK, 110, _format("Q3_K", NIBBLES - np.float32(4), 16), _q3_k, _LESS_32),
    GgmlFormat(_BLOCK, 144, _format("Q4_K", NIBBLES, 32, has_minima=True), _q4_k, UNSIGNED),
    GgmlFormat(_BLOCK, 176, _format("Q5_K", UNSIGNED, 32, has_minima=True), _q5_k, UNSIGNED),
    GgmlFormat(_BLOCK, 210, _format("Q6_K", _LESS_32, 16), _q6_k, SIGNED),
    GgmlFormat(_BLOCK, 136, _format("IQ4_XS", IQ4_VALUES, 32), _iq4_xs, _LESS_32),
)
