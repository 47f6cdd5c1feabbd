"""Matrices in strips: copied for new tokens on software GPUs, in the order in which they are read.

A strip is what a subgroup makes, four columns of the results an invocation. Of each 16 bytes of a
row of weights those of all its columns lie together, so that an invocation's neighbours read what
follows its own, and a workgroup one stretch of memory from end to end. Rows as they are stored
would be as many streams as a strip has columns, which no processor fetches ahead; and buffers of
codes are read one word and one invocation at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ITEM_SIZE, ceil_div
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import TEXEL, Storage, Tensor, matrix, vector
from qlora_wgpu.kernels.dequantize import format_constants, whole_blocks
from qlora_wgpu.kernels.quantized_rows import QuantizedRows, format_begins, is_affine
from qlora_wgpu.weight_format import WeightFormat

CODES = 32  # of 16 bytes
STRIPS = "weights in strips"
"""What they are counted as."""


@dataclass(frozen=True)
class Strips:
    """A matrix, or up to three of one format one below the other, in strips.

    Attributes:
        rows: Of all, which are the columns of a product.
        columns: Of all.
        words: Codes, or operands of their type.
        form: The format of the codes, if it is quantized.
        scales: float32, of each block of each column; its format's last factor is in them.
        minima: Likewise, where the format has them.
    """

    rows: int
    columns: int
    words: Tensor
    form: WeightFormat | None = None
    scales: Tensor | None = None
    minima: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all, and columns."""
        return self.rows, self.columns

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return 0 if self.form is None else self.columns // self.form.blocksize

    @property
    def unit_bytes(self) -> int:
        """Bytes of what an invocation reads of a column at a time."""
        return TEXEL if self.form is not None else 8 * ITEM_SIZE[self.words.dtype]

    def constants(self) -> dict[str, Constant]:
        """How the codes are decoded."""
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
    """Whether codes are of 4 bits, and 16 bytes of them share a row and a block that it begins."""
    whole = whole_blocks(form, columns, CODES) and columns % form.blocksize == 0
    return whole and form.bits == 4


def dense_strips(name: str, rows: int, like: Tensor, lanes: int) -> Strips:
    """Room for the strips of so many rows of operands like these."""
    whole = ceil_div(rows, 4 * lanes) * 4 * lanes
    words = matrix(name, whole, like.columns, like.dtype)
    words.storage, words.texture = Storage(name, STRIPS, words.nbytes, texture=True), True
    return Strips(rows, like.columns, words)


def quantized_strips(name: str, w: QuantizedRows, lanes: int) -> Strips:
    """Room for the strips of quantized matrices."""
    rows, columns = w.shape
    strips = ceil_div(rows, 4 * lanes)
    codes = _texels(name, strips * 4 * lanes * columns // CODES)
    blocks = strips * lanes * (columns // w.form.blocksize)
    scales = _texels(f"{name}.scales", blocks)
    minima = _texels(f"{name}.minima", blocks) if w.form.has_minima else None
    return Strips(rows, columns, codes, w.form, scales, minima)


def _texels(name: str, count: int) -> Tensor:
    storage = Storage(name, STRIPS, TEXEL * count, texture=True)
    return vector(name, 4 * count, "uint32", storage)


def copy_rows(g: Graph, x: Tensor, rows: int, strips: Strips, column0: int) -> None:
    """Copies the rows of operands, or the codes of rows, to the strips' columns from one on."""
    words = strips.unit_bytes // TEXEL
    units = x.nbytes // rows // strips.unit_bytes
    g.launch(
        "few_rows/strip_copy.wgsl",
        rows * units * words,
        {"x": x, "y": strips.words},
        {"rows": rows, "units": units, "words": words, "column0": column0},
        {"LANES": g.profile.subgroup_size},
    )


def copy_scales(g: Graph, w: QuantizedRows, strips: Strips) -> None:
    """Puts float32 scales and minima there."""
    begins = [sum(w.rows[:n]) if n < len(w.rows) else 0xFFFFFFFF for n in (1, 2)]
    for second, y in enumerate((strips.scales, strips.minima)):
        if y is None:
            continue
        count = y.nbytes // TEXEL
        g.launch(
            "few_rows/strip_scales.wgsl",
            count,
            {"group": w.words, "y": y},
            {
                "columns": strips.rows,
                "units": strips.columns // 8,
                "blocks": strips.blocks,
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
