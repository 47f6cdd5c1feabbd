"""Frozen matrices for products of few rows: codes, or packed in strips."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import ITEM_SIZE, TEXEL, Storage, Tensor, ceil_div, matrix, vector
from qlora_wgpu.kernels.dequantize import (
    QuantizedView,
    format_begins,
    format_constants,
    whole_blocks,
)
from qlora_wgpu.weight_format import WeightFormat


def decodes(form: WeightFormat, columns: int) -> bool:
    """Whether these kernels support a format: eight neighbours must share a row and a block."""
    return whole_blocks(form, columns, 8)


def is_affine(form: WeightFormat) -> bool:
    """Whether a code's value is exactly the first value plus the code."""
    values = form.quant_map
    return bool(np.array_equal(values, values[0] + np.arange(values.size, dtype=np.float32)))


CODES = 32  # per 16 bytes
PACKED = "weights in strips"  # their kind in the memory plan


@dataclass(frozen=True)
class PackedWeights:
    """A matrix, or up to three stacked ones of one format, in strips.

    A strip has the weights of a subgroup, with four result columns per invocation. Rows of weights
    are interleaved in units of 16 bytes, so that neighbouring invocations read neighbouring bytes,
    and a workgroup one contiguous range of memory. Rows as stored would be as many streams as a
    strip has columns, which no processor prefetches; and codes in buffers are read one word and one
    invocation at a time.
    """

    rows: int  # of all matrices: the columns of a product
    columns: int
    words: Tensor  # codes or operands
    form: WeightFormat | None = None  # the format of the codes, if quantized
    scales: Tensor | None = None  # float32, for each block of each column
    minima: Tensor | None = None  # the same, if the format has minima

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def blocks(self) -> int:
        return 0 if self.form is None else self.columns // self.form.blocksize

    @property
    def unit_bytes(self) -> int:
        """Bytes of a column that an invocation reads at a time."""
        return TEXEL if self.form is not None else 8 * ITEM_SIZE[self.words.dtype]

    def constants(self) -> dict[str, Constant]:
        form = self.form
        if form is None:
            return {"DENSE": True, "STRIPS": True, "MINIMA": False}
        values = {f"V{n}": float(value) for n, value in enumerate(form.quant_map)}
        return {
            "DENSE": False,
            "STRIPS": True,
            "CHUNK": CODES // 8,
            "SCALED": 8 if form.blocksize % 64 == 0 else 4,
            "AFFINE": is_affine(form),
            **values,
            **format_constants(form),
            "TWO_FACTORS": False,
        }


def fits(form: WeightFormat, columns: int) -> bool:
    """Whether codes have 4 bits, and each aligned 16 bytes share a row and a block."""
    whole = whole_blocks(form, columns, CODES) and columns % form.blocksize == 0
    return whole and form.bits == 4


def packed_dense(name: str, rows: int, like: Tensor, lanes: int) -> PackedWeights:
    whole = ceil_div(rows, 4 * lanes) * 4 * lanes
    words = matrix(name, whole, like.columns, like.dtype)
    words.storage, words.texture = Storage(name, PACKED, words.nbytes, texture=True), True
    return PackedWeights(rows, like.columns, words)


def packed_codes(name: str, w: QuantizedView, lanes: int) -> PackedWeights:
    rows, columns = w.shape
    strips = ceil_div(rows, 4 * lanes)
    codes = _texels(name, strips * 4 * lanes * columns // CODES)
    blocks = strips * lanes * (columns // w.form.blocksize)
    scales = _texels(f"{name}.scales", blocks)
    minima = _texels(f"{name}.minima", blocks) if w.form.has_minima else None
    return PackedWeights(rows, columns, codes, w.form, scales, minima)


def _texels(name: str, count: int) -> Tensor:
    storage = Storage(name, PACKED, TEXEL * count, texture=True)
    return vector(name, 4 * count, "uint32", storage)


def copy_rows(g: Graph, x: Tensor, rows: int, packed: PackedWeights, column0: int) -> None:
    """Copies rows of operands or codes to the strips, from column ``column0`` on."""
    words = packed.unit_bytes // TEXEL
    units = x.nbytes // rows // packed.unit_bytes
    g.launch(
        "few_rows/strip_copy.wgsl",
        rows * units * words,
        {"x": x, "y": packed.words},
        {"rows": rows, "units": units, "words": words, "column0": column0},
        {"LANES": g.profile.subgroup_size},
    )


def copy_scales(g: Graph, w: QuantizedView, packed: PackedWeights) -> None:
    begins = [sum(w.rows[:n]) if n < len(w.rows) else 0xFFFFFFFF for n in (1, 2)]
    for second, y in enumerate((packed.scales, packed.minima)):
        if y is None:
            continue
        count = y.nbytes // TEXEL
        g.launch(
            "few_rows/strip_scales.wgsl",
            count,
            {"group": w.words, "y": y},
            {
                "columns": packed.rows,
                "units": packed.columns // 8,
                "blocks": packed.blocks,
                "count": count,
                "begin1": begins[0],
                "begin2": begins[1],
                **format_begins(w),
            },
            {
                "LANES": g.profile.subgroup_size,
                "SECOND": bool(second),
                "GROUP": True,
                "FOURS": False,
                "EXPERTS": False,
                **format_constants(w.form),
            },
        )
