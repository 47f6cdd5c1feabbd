"""Products of few rows with a frozen matrix, as a new token makes them: it is read once.

A strip is what a subgroup makes, four columns of the results an invocation. Of each 16 bytes of a
row of weights those of all its columns lie together, so that an invocation's neighbours read what
follows its own, and a workgroup one stretch of memory from end to end. Rows as they are stored
would be as many streams as a strip has columns, which no processor fetches ahead; and buffers of
codes are read one word and one invocation at a time.

A quantized matrix is decoded on the way, whatever its format (``weight_format.py``); nothing of it
is written. A row's sums have one order, whatever rows are beside it and however many: a text's
tokens do not depend on the texts that are computed with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, Profile
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import ITEM_SIZE, TEXEL, Storage, Tensor, ceil_div, matrix, vector
from qlora_wgpu.kernels.common import ExpertTiles, Kernel, expert_constants, expert_params
from qlora_wgpu.kernels.dequantize import (
    EXPERT_STRIDES,
    MOST_TOGETHER,
    format_constants,
    whole_blocks,
)
from qlora_wgpu.kernels.gemm import LoraTerm, further_layers
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


_MOST_ROWS = 8  # that an invocation has sums for; of more rows, all weights are read again
_THREADS = 128  # of a workgroup on GPUs
_MANY_READS = 350  # of x: a buffer's take 43 ns, word by word, a texture's 17, and a copy 9,000
_FEW_COLUMNS = 64  # of so few, more threads share a row: there are not many workgroups


@dataclass(frozen=True)
class FewRows:
    """y = scale · x·wᵀ + u·bᵀ + bias + residual.

    Attributes:
        x: (rows, K), of any type.
        w: (columns, K): of any type, or quantized, or in strips; with experts the matrices of some
            of them, one below the other.
        ys: (rows, ·): the results of up to three layers of one input, one below the other in ``w``.
            Of one layer the columns from ``row0`` on are written.
        row0: First row of ``w`` within the whole matrix; a multiple of eight.
        scale: The factor of the product alone.
        lora: A term to add, if any.
        bias: The bias of the whole matrix, float32; with experts (all experts, columns).
        bias_begins: Where in ``bias`` those of the second and the third layer begin, in elements.
        residual: What to add, of y's layout.
        experts: If given, each tile of rows meets its expert's matrix.
        columns_each: Rows of an expert's matrix, where those of all do not follow each other.
        apart: Elements from one such matrix to the next.
        label: For timing tables.
    """

    x: Tensor
    w: Tensor | QuantizedRows | Strips
    ys: tuple[Tensor, ...]
    row0: int = 0
    scale: float = 1.0
    lora: LoraTerm | None = None
    bias: Tensor | None = None
    bias_begins: tuple[int, ...] = ()
    residual: Tensor | None = None
    experts: ExpertTiles | None = None
    columns_each: int = 0
    apart: int = 0
    label: str = "few_rows/forward"

    def __post_init__(self) -> None:
        rows, columns = self.w.shape
        across = columns == self.x.columns
        one = len(self.ys) == 1
        whole = one or (self.columns == sum(y.columns for y in self.ys) and not self.row0)
        if not across or not whole or any(y.rows != self.x.rows for y in self.ys):
            raise GraphError(f"few_rows: {self.x}, {self.w} and {self.ys} do not fit each other")
        if isinstance(self.w, Strips) and self.experts is not None:
            raise GraphError(f"few_rows: {self.w.words} are strips of no experts")
        if isinstance(self.w, QuantizedRows) and not decodes(self.w.form, self.w.columns):
            raise GraphError(f"few_rows: {self.w.form.name} of {columns} columns is not decoded")
        if not one and (self.residual is not None or len(self.ys) > MOST_TOGETHER):
            raise GraphError(f"few_rows: {self.ys} are no layers of {self.w}")
        if self.experts is None or self.is_quantized or self.columns_each:
            return
        if rows % self.experts.count:
            raise GraphError(f"few_rows: {self.w} is not of {self.experts.count} experts")

    @property
    def is_quantized(self) -> bool:
        """Whether the matrix is decoded on the way."""
        return isinstance(self.w, QuantizedRows)

    @property
    def columns(self) -> int:
        """Columns of the results."""
        rows = self.w.shape[0]
        if self.columns_each:
            return self.columns_each
        return rows if self.experts is None or self.is_quantized else rows // self.experts.count

    @property
    def rows_together(self) -> int:
        """Rows that an invocation makes: those of one expert."""
        return 1 if self.experts is not None else min(self.x.rows, _MOST_ROWS)

    def insists(self, profile: Profile) -> bool:
        """Whether x is read so often on software GPUs that it is to lie in a texture."""
        if not isinstance(self.w, Strips):
            return False
        workgroups = ceil_div(self.columns, 4 * profile.subgroup_size)
        return self.x.rows * workgroups * ceil_div(self.x.units(8), 8) >= _MANY_READS

    def launch(
        self,
        g: Graph,
        path: str,
        columns: int,
        constants: dict[str, Constant],
        together: int | None = None,
    ) -> None:
        """Adds the launch of a kernel whose workgroups make so many columns, and rows together."""
        tensors: dict[str, Tensor | None] = {
            "x": self.x,
            "y": self.ys[0],
            "bias": self.bias,
            "residual": self.residual,
            **_bound(self.w),
        }
        if self.lora is not None:
            tensors |= {"u": self.lora.u, "b": self.lora.factor}
        of_experts = expert_constants(self.experts, tensors)  # which binds something
        others, layers = further_layers("y", self.ys[0], self.ys[1:], 4)
        bias1, bias2 = (*(begin // 4 for begin in self.bias_begins), 0, 0)[:2]
        together = together or self.rows_together
        g.launch(
            path,
            (ceil_div(self.columns, columns), ceil_div(self.x.rows, together), 1),
            tensors | others,
            {
                "rows": self.x.rows,
                "columns": self.columns,
                "units": self.x.units(8),
                "x_stride": self.x.units(8),
                **_strides(self.w, self.columns, g.profile),
                **({"w_expert": self.apart // 8} if self.columns_each else {}),
                "y_stride": self.ys[0].units(4),
                "y_unit0": self.row0 // 4,
                "scale": self.scale,
                "r": self.lora.rank(with_rows=True) if self.lora is not None else 0,
                "r_stride": self.lora.u.stride if self.lora is not None else 0,
                "b_stride": self.lora.factor.stride if self.lora is not None else 0,
                **layers,
                "bias1": bias1,
                "bias2": bias2,
                "bias_expert": self.bias.units(4) if self.experts and self.bias else 0,
                **expert_params(self.experts, self.lora.stride // 4 if self.lora else 0),
                **format_begins(self.w if isinstance(self.w, QuantizedRows) else None),
            },
            {
                "ROWS": together,
                "ACCUMULATE": False,
                "EIGHT": False,
                "KEEPS": False,
                "X_IN_TEXTURE": self.insists(g.profile),
                **of_experts,
                **_codes(self.w, g.profile, experts=self.experts is not None),
                **constants,
            },
            flops=2 * self.x.rows * self.columns * self.x.columns,
            label=self.label,
        )


def _bound(w: Tensor | QuantizedRows | Strips) -> dict[str, Tensor | None]:
    """What of a matrix is bound."""
    if isinstance(w, Strips):
        of_codes = {} if w.form is None else {"scales": w.scales, "minima": w.minima}
        return {"w": w.words, **of_codes}
    return {"w": w} if isinstance(w, Tensor) else {"group": w.words}


def _strides(w: Tensor | QuantizedRows | Strips, columns: int, profile: Profile) -> dict[str, int]:
    """From one row, expert or strip to the next."""
    if isinstance(w, Strips):
        lanes = profile.subgroup_size
        units = w.words.units(8) if w.form is None else w.columns // CODES
        return {"w_stride": 4 * units * lanes, "w_expert": 0, "scale_stride": w.blocks * lanes}
    units = w.units(8) if isinstance(w, Tensor) else 0
    return {"w_stride": units, "w_expert": columns * units, "scale_stride": 0}


def _codes(
    w: Tensor | QuantizedRows | Strips, profile: Profile, *, experts: bool
) -> dict[str, Constant]:
    """The constants of how a matrix is decoded."""
    if isinstance(w, Strips):
        return w.constants()
    if isinstance(w, Tensor):
        return {"DENSE": True, "STRIPS": False}
    form, columns = w.form, w.columns
    unit_words = form.bits // 4
    whole = columns % (32 // unit_words) == 0
    affine = is_affine(form)
    return {
        "DENSE": False,
        "STRIPS": False,
        "GROUP": True,
        "FOURS": not _is_cpu(profile),
        "EXPERTS": experts,
        "UNIT_WORDS": unit_words,
        "WHOLE": whole,
        "CHUNK": 4 // unit_words if whole else 1,
        "SCALED": next(n for n in (8, 4, 2, 1) if whole_blocks(form, columns, 8 * n)),
        "AFFINE": affine,
        "SELECTS": form.bits == 4 and not affine and _is_cpu(profile),
        **format_constants(form),
    }


def _taken_together(problem: FewRows, profile: Profile) -> dict[str, Constant]:
    """How many units of a chunk an invocation has at a time: all, or one after the other."""
    least = profile.unit_by_unit
    by_unit = 0 < least <= problem.rows_together
    chunk = _codes(problem.w, profile, experts=False).get("CHUNK", 1)
    return {"UNIT_BY_UNIT": by_unit, "TOGETHER": 1 if by_unit else chunk}


def _is_cpu(profile: Profile) -> bool:
    return profile.name == CPU_PROFILE.name


class InStrips:
    """For software adapters: of matrices that were copied for it."""

    def fits(self, problem: FewRows, profile: Profile) -> bool:
        """Of those."""
        return isinstance(problem.w, Strips)

    def launch(self, g: Graph, problem: FewRows) -> None:
        """Adds the launch."""
        _launch_broadcasting(g, problem, "few_rows/strips.wgsl")


class Narrow:
    """For software adapters: where there are so few columns that invocations share them."""

    def fits(self, problem: FewRows, profile: Profile) -> bool:
        """Of float32 in a buffer, as LoRA's A is, without experts and without a term."""
        w = problem.w
        is_buffer = isinstance(w, Tensor) and w.dtype == "float32" and not w.texture
        plain = is_buffer and problem.experts is None and problem.lora is None
        return profile.textures and plain and problem.columns <= _FEW_COLUMNS

    def launch(self, g: Graph, problem: FewRows) -> None:
        """Adds the launch."""
        constants: dict[str, Constant] = {"THREADS": g.profile.subgroup_size, "ROWS": 1}
        problem.launch(g, "few_rows/narrow.wgsl", 8, constants, together=1)


class Subgroup:
    """For software adapters: each invocation has four columns, rows of x are broadcast."""

    def fits(self, problem: FewRows, profile: Profile) -> bool:
        """Where subgroups are known."""
        return profile.textures

    def launch(self, g: Graph, problem: FewRows) -> None:
        """Adds the launch."""
        _launch_broadcasting(g, problem, "few_rows/subgroup.wgsl")


def _launch_broadcasting(g: Graph, problem: FewRows, path: str) -> None:
    threads, units = g.profile.subgroup_size, problem.x.units(8)
    span = next(n for n in (8, 4, 2, 1) if units % n == 0 and n <= threads)
    problem.launch(g, path, 4 * threads, {"THREADS": threads, "SPAN": span})


class Shared:
    """For GPUs: neighbours read neighbouring bytes of a row, and add up what they made."""

    def fits(self, problem: FewRows, profile: Profile) -> bool:
        """Everywhere."""
        return True

    def launch(self, g: Graph, problem: FewRows) -> None:
        """Adds the launch."""
        threads, groups = 1, g.profile.flat_group
        if not _is_cpu(g.profile):
            chunks = problem.x.columns // (32 if problem.is_quantized else 8)
            most = _THREADS if problem.columns <= _FEW_COLUMNS else 32
            threads = max(min(1 << max(chunks.bit_length() - 1, 0), most), 8)
            groups = _THREADS // threads
        constants: dict[str, Constant] = {
            "THREADS": threads,
            "GROUPS": groups,
            "ONE_THREAD": threads == 1,
            **_taken_together(problem, g.profile),
        }
        problem.launch(g, "few_rows/shared.wgsl", 4 * groups, constants)


FEW_ROWS: Kernel[FewRows] = Kernel("few_rows", (InStrips(), Narrow(), Subgroup(), Shared()))
KERNELS = (FEW_ROWS,)
