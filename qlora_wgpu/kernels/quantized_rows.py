"""Quantized matrices as products of few rows read them: where they are, in one range of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.dequantize import EXPERT_STRIDES, MOST_TOGETHER, whole_blocks
from qlora_wgpu.weight_format import WeightFormat

_PARTS = ("codes", "absmax", "nested", "maps")


@dataclass(frozen=True)
class QuantizedRows:
    """Quantized matrices of one format, one below the other, all parts in one range of words.

    Attributes:
        words: The range, uint32.
        begins: For codes, absmax, nested and maps where each matrix's begins, in words.
        rows: Of each matrix.
        columns: Of all.
        form: Their format; all share the values of the codes.
        strides: Words of codes, absmax, nested_absmax and maps from one expert to the next.
    """

    words: Tensor
    begins: Mapping[str, Sequence[int]]
    rows: Sequence[int]
    columns: int
    form: WeightFormat
    strides: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all, and columns."""
        return sum(self.rows), self.columns


def format_begins(w: QuantizedRows | None) -> dict[str, int]:
    """Parameters: where parts of a quantized matrix begin; zeros of another one."""
    places = {name: (0,) if w is None else tuple(w.begins.get(name, (0,))) for name in _PARTS}
    return {
        f"{name}{i}": (*begins, 0, 0)[i]
        for name, begins in places.items()
        for i in range(MOST_TOGETHER)
    } | dict(zip(EXPERT_STRIDES, (0, 0, 0, 0) if w is None else w.strides, strict=True))


def decodes(form: WeightFormat, columns: int) -> bool:
    """Whether these kernels read a format: where eight neighbours share a row and a block."""
    return whole_blocks(form, columns, 8)


def is_affine(form: WeightFormat) -> bool:
    """Whether a code's value is the first one's and the code, exactly."""
    values = form.quant_map
    return bool(np.array_equal(values, values[0] + np.arange(values.size, dtype=np.float32)))
