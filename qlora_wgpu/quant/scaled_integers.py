"""Weights as integers with a scale, and perhaps a zero, for each block: compressed-tensors.

w = (q - zero) · scale, with q and zero signed; the difference is exact, and only the product is
rounded, so that scales may be of any type.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from qlora_wgpu.quant.number_formats import NIBBLES, SIGNED, UNSIGNED
from qlora_wgpu.quant.quantized_weight import QuantizedWeight, pack_nibbles
from qlora_wgpu.weight_format import WeightFormat

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]


def packed_format(
    bits: int, tile: tuple[int, int], columns: int, *, has_zeros: bool
) -> WeightFormat:
    """The form of integers of few bits, which are stored without a sign: q + 2^(bits - 1).

    With zeros, which are stored likewise, what is added to both cancels.

    Args:
        bits: From 1 to 8; codes have 4 or 8 on the device.
        tile: Rows and columns of a block; ``WHOLE`` for all.
        columns: in_features.
        has_zeros: Whether blocks have zeros.
    """
    codes = NIBBLES if bits <= 4 else UNSIGNED
    return _form(f"INT{bits}", codes if has_zeros else _centred(bits), tile, columns, has_zeros)


def byte_format(tile: tuple[int, int], columns: int, *, has_zeros: bool) -> WeightFormat:
    """The form of integers of 8 bits in two's complement; arguments as of ``packed_format``."""
    return _form("INT8", SIGNED, tile, columns, has_zeros)


def scaled_weight(
    form: WeightFormat,
    codes: UInt8Array,
    scales: Float32Array,
    zeros: npt.NDArray[np.float32] | None,
    dtype: str,
) -> QuantizedWeight:
    """A matrix.

    Args:
        form: Its form.
        codes: (out_features, in_features), as stored.
        scales: One of each block, in any shape.
        zeros: As many, in the codes' numbers, if the form has zeros.
        dtype: The weights' type in PyTorch's words.
    """
    absmax = scales.reshape(-1).astype(np.float32)
    if zeros is not None:
        absmax = np.stack([absmax, -zeros.reshape(-1)], axis=1)
    return QuantizedWeight(
        shape=(codes.shape[0], codes.shape[1]),
        codes=pack_nibbles(codes) if form.bits == 4 else codes.reshape(-1),
        quant_map=form.quant_map,
        blocksize=form.blocksize,
        absmax=absmax,
        dtype=dtype,
        name=form.name,
        block_rows=form.block_rows,
        has_zeros=form.has_zeros,
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
    neighbours = rows == 1 and columns % across == 0  # which more kernels read than tiles
    return WeightFormat(
        name,
        codes,
        across,
        has_minima=has_zeros,
        has_zeros=has_zeros,
        block_rows=None if neighbours else rows,
    )
