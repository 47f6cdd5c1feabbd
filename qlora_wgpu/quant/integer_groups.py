"""Weights as unsigned integers with a scale and a zero per group of a row: AWQ and GPTQ.

w = (q - zero) · scale, which is q · scale + minimum with minimum = -zero · scale: scales are
float16 and integers short, so that every product and the sum are exact in float32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.quant.number_formats import NIBBLES, UNSIGNED
from qlora_wgpu.quant.quantized_weight import QuantizedWeight, pack_nibbles
from qlora_wgpu.weight_format import WHOLE, WeightFormat

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word that holds each of its eight weights

UInt8Array = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


def group_format(name: str, bits: int, columns: int, group_size: int) -> WeightFormat:
    """The form of a matrix.

    Args:
        name: "AWQ" or "GPTQ".
        bits: 4 or 8.
        columns: in_features.
        group_size: Weights of a row that share a scale, or -1 for all.
    """
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
    """A matrix of AWQ or GPTQ.

    Args:
        form: Its form.
        codes: (in_features, out_features), q.
        zeros: (groups, out_features); 256 of GPTQ's 8 bits does not occur.
        scales: (groups, out_features).
    """
    minima = -zeros.astype(np.float32) * scales
    rows = np.ascontiguousarray(codes.T)
    return QuantizedWeight(
        shape=(rows.shape[0], rows.shape[1]),
        codes=pack_nibbles(rows) if form.bits == 4 else rows.reshape(-1),
        quant_map=form.quant_map,
        blocksize=form.blocksize,
        absmax=np.stack([scales.T, minima.T], axis=2).reshape(-1, 2),
        dtype="float16",
        name=form.name,
        block_rows=form.block_rows,
    )


def unpack_awq(words: Int32Array) -> UInt8Array:
    """Eight 4-bit integers of each word along the last axis, in AWQ's order."""
    return _unpacked(words, 4)[..., list(_AWQ_ORDER)].reshape(*words.shape[:-1], -1)


def unpack(words: Int32Array, bits: int) -> UInt8Array:
    """The integers of each run of words along the last axis, the lowest bits first.

    Integers whose bits do not divide 32 lie across the ends of words, 32 of them in ``bits`` words.
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
