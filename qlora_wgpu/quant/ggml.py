"""Quantized tensors of GGUF files, kept as they are: the same numbers in this package's layout.

ggml stores a row as blocks of 32 to 256 weights with their scales among them. They are taken
apart: codes of at most 4 bits become 4, wider ones 8, and scales that are integers times a float16
stay so, as scales in 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.quant import ggml_blocks, ggml_super_blocks
from qlora_wgpu.quant.ggml_format import GgmlFormat
from qlora_wgpu.quant.quantized_weight import QuantizedWeight, pack_nibbles
from qlora_wgpu.weight_format import WHOLE

__all__ = ["GGML_FORMATS", "GgmlFormat", "repack_ggml"]

GGML_FORMATS: Mapping[str, GgmlFormat] = {
    form.name: form for form in (*ggml_blocks.FORMATS, *ggml_super_blocks.FORMATS)
}
"""By the names of ggml's types."""

_WEIGHTS = 1 << 20  # taken apart at a time


def repack_ggml(
    type_name: str, raw: npt.NDArray[np.uint8], shape: tuple[int, int], where: str
) -> QuantizedWeight:
    """A matrix of a GGUF file.

    Args:
        type_name: A key of ``GGML_FORMATS``.
        raw: Its bytes as stored.
        shape: (out_features, in_features): GGUF's dimensions, the last first.
        where: The file and the tensor, for messages.

    Raises:
        CheckpointError: If there are more or fewer bytes than the shape asks for, rows are no whole
            number of blocks, or a scale is NaN or infinite.
    """
    form = GGML_FORMATS[type_name]
    rows, columns = shape
    if columns % form.block:
        raise CheckpointError(
            f"{where} has rows of {columns} weights, but {type_name} stores {form.block} at a time"
        )
    count = rows * columns // form.block
    if raw.size != count * form.block_bytes:
        raise CheckpointError(
            f"{where} has {raw.size} bytes, but {rows} x {columns} weights of {type_name} take "
            f"{count * form.block_bytes}"
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
        codes=np.empty(stored.code_bytes(*shape), np.uint8),
        quant_map=stored.quant_map,
        blocksize=stored.blocksize,
        absmax=np.empty((blocks, *pair), scale_dtype),
        nested_absmax=nested,
        nested_quant_map=form.scale_map,
        nested_blocksize=stored.nested_blocksize or WHOLE,
        dtype="float16",
        name=form.name,
    )


def _put(
    form: GgmlFormat, weight: QuantizedWeight, blocks: npt.NDArray[np.uint8], first: int
) -> None:
    """Writes stored blocks, the first of which has number ``first``."""
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
            f"{where} holds a scale that is NaN or infinite, so the model is damaged"
        )
