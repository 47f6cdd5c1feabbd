"""Weights in 8 bits of safetensors folders: bitsandbytes' integers, and floats (FP8)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.quant.number_formats import E4M3, E5M2, SIGNED
from qlora_wgpu.quant.quantized_weight import QuantizedWeight
from qlora_wgpu.weight_format import WHOLE, WeightFormat

_PER_127 = float(np.float32(7.874015718698502e-3))  # bitsandbytes multiplies by 1 / 127

FP8_MAPS = {"F8_E4M3": E4M3, "F8_E5M2": E5M2}
"""What 8-bit floats stand for, by safetensors' names of their types."""

INT8 = WeightFormat("LLM.int8", SIGNED, WHOLE, block_rows=1, factor=_PER_127)
"""w = q · scale of its row · (1 / 127), rounded after each product."""


def fp8_format(stored: str, tile: tuple[int, int]) -> WeightFormat:
    """w = q · scale of its tile.

    Args:
        stored: The type of q, a key of ``FP8_MAPS``.
        tile: Rows and columns that share a scale; ``WHOLE`` for all.
    """
    return WeightFormat(
        f"FP8 {stored.removeprefix('F8_')}", FP8_MAPS[stored], tile[1], block_rows=tile[0]
    )


def of_bytes(
    form: WeightFormat,
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    dtype: str,
) -> QuantizedWeight:
    """A weight of a byte each and float32 scales.

    Args:
        form: Its form.
        codes: (out_features, in_features).
        scales: One of each block, in any shape.
        dtype: The weights' type in PyTorch's words.
    """
    return QuantizedWeight(
        shape=(codes.shape[0], codes.shape[1]),
        codes=codes.reshape(-1),
        quant_map=form.quant_map,
        blocksize=form.blocksize,
        absmax=scales.reshape(-1).astype(np.float32),
        dtype=dtype,
        name=form.name,
        block_rows=form.block_rows,
        factor=form.factor,
    )
