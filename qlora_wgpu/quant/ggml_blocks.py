"""ggml's types whose blocks have one scale: Q4_0 to Q8_0, IQ4_NL, MXFP4 and NVFP4.

Layouts and formulas: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.quant.ggml_format import (
    Float32Array,
    GgmlFormat,
    Parts,
    UInt8Array,
    halves,
    low_then_high,
)
from qlora_wgpu.quant.number_formats import E8M0, IQ4_VALUES, NIBBLES, SIGNED, UNSIGNED
from qlora_wgpu.weight_format import WHOLE, WeightFormat

_BLOCK = 32

# ggml doubles E2M1's values and halves their scales; its zeros have no sign.
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
    """Half of what NVFP4's scales stand for, without a sign; ggml takes 127 for 0."""
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


FORMATS = (
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
