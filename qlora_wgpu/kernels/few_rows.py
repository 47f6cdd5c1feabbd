"""Products of few rows with a frozen matrix, as a new token makes them: the matrix is read once.

A quantized matrix is decoded on the way, whatever its format (``weight_format.py``); nothing of it
is written. A row's sums have one order, whatever rows are beside it and however many: a text's
tokens do not depend on the texts that are computed with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qlora_wgpu.gpu.profile import CPU_PROFILE, Profile
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.dequantize import (
    EXPERT_STRIDES,
    MOST_TOGETHER,
    format_constants,
    whole_blocks,
)
from qlora_wgpu.kernels.experts import ExpertTiles, expert_constants, expert_params
from qlora_wgpu.kernels.gemm import LoraTerm, further_layers
from qlora_wgpu.kernels.kernel import Kernel
from qlora_wgpu.weight_format import WeightFormat

_MOST_ROWS = 8  # that an invocation has sums for; of more rows, all weights are read again
_THREADS = 128  # of a workgroup on GPUs
_FEW_COLUMNS = 64  # of so few, more threads share a row: there are not many workgroups


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


@dataclass(frozen=True)
class FewRows:
    """y = scale · x·wᵀ + u·bᵀ + bias + residual.

    Attributes:
        x: (rows, K), of any type.
        w: (columns, K): of any type, or quantized; with experts the matrices of some of them, one
            below the other.
        ys: (rows, ·): the results of up to three layers of one input, one below the other in ``w``.
            Of one layer the columns from ``row0`` on are written.
        row0: First row of ``w`` within the whole matrix; a multiple of eight.
        scale: The factor of the product alone.
        lora: A term to add, if any.
        bias: The bias of the whole matrix, float32; with experts (all experts, columns).
        bias_begins: Where in ``bias`` those of the second and the third layer begin, in elements.
        residual: What to add, of y's layout.
        experts: If given, each tile of rows meets its expert's matrix.
        label: For timing tables.
    """

    x: Tensor
    w: Tensor | QuantizedRows
    ys: tuple[Tensor, ...]
    row0: int = 0
    scale: float = 1.0
    lora: LoraTerm | None = None
    bias: Tensor | None = None
    bias_begins: tuple[int, ...] = ()
    residual: Tensor | None = None
    experts: ExpertTiles | None = None
    label: str = "few_rows/forward"

    def __post_init__(self) -> None:
        rows, columns = self.w.shape
        across = columns == self.x.columns
        one = len(self.ys) == 1
        whole = one or (self.columns == sum(y.columns for y in self.ys) and not self.row0)
        if not across or not whole or any(y.rows != self.x.rows for y in self.ys):
            raise GraphError(f"few_rows: {self.x}, {self.w} and {self.ys} do not fit each other")
        if isinstance(self.w, QuantizedRows) and not decodes(self.w.form, self.w.columns):
            raise GraphError(f"few_rows: {self.w.form.name} of {columns} columns is not decoded")
        if not one and (self.residual is not None or len(self.ys) > MOST_TOGETHER):
            raise GraphError(f"few_rows: {self.ys} are no layers of {self.w}")
        if self.experts is not None and rows % self.experts.count and not self.is_quantized:
            raise GraphError(f"few_rows: {self.w} is not of {self.experts.count} experts")

    @property
    def is_quantized(self) -> bool:
        """Whether the matrix is decoded on the way."""
        return isinstance(self.w, QuantizedRows)

    @property
    def columns(self) -> int:
        """Columns of the results."""
        rows = self.w.shape[0]
        return rows if self.experts is None or self.is_quantized else rows // self.experts.count

    @property
    def rows_together(self) -> int:
        """Rows that an invocation makes: those of one expert."""
        return 1 if self.experts is not None else min(self.x.rows, _MOST_ROWS)

    def launch(self, g: Graph, path: str, columns: int, constants: dict[str, Constant]) -> None:
        """Adds the launch of a kernel whose workgroups make so many columns."""
        tensors: dict[str, Tensor | None] = {
            "x": self.x,
            "y": self.ys[0],
            "bias": self.bias,
            "residual": self.residual,
            "w" if isinstance(self.w, Tensor) else "group": (
                self.w if isinstance(self.w, Tensor) else self.w.words
            ),
        }
        if self.lora is not None:
            tensors |= {"u": self.lora.u, "b": self.lora.factor}
        others, layers = further_layers("y", self.ys[0], self.ys[1:], 4)
        bias1, bias2 = (*(begin // 4 for begin in self.bias_begins), 0, 0)[:2]
        together = self.rows_together
        g.launch(
            path,
            (ceil_div(self.columns, columns), ceil_div(self.x.rows, together), 1),
            tensors | others,
            {
                "rows": self.x.rows,
                "columns": self.columns,
                "units": self.x.units(8),
                "x_stride": self.x.units(8),
                "w_stride": self.w.units(8) if isinstance(self.w, Tensor) else 0,
                "w_expert": self.columns * self.w.units(8) if isinstance(self.w, Tensor) else 0,
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
                **_begins(self.w),
            },
            {
                "ROWS": together,
                "ACCUMULATE": False,
                **expert_constants(self.experts, tensors),
                **_codes(self.w, g.profile, experts=self.experts is not None),
                **constants,
            },
            flops=2 * self.x.rows * self.columns * self.x.columns,
            label=self.label,
        )


def _begins(w: Tensor | QuantizedRows) -> dict[str, int]:
    """Where parts of a quantized matrix begin; zeros of another one."""
    names = ("codes", "absmax", "nested", "maps")
    if isinstance(w, Tensor):
        return {f"{n}{i}": 0 for n in names for i in range(MOST_TOGETHER)} | dict.fromkeys(
            EXPERT_STRIDES, 0
        )
    places = {name: tuple(w.begins.get(name, (0,))) for name in names}
    return {
        f"{name}{i}": (*begins, 0, 0)[i]
        for name, begins in places.items()
        for i in range(MOST_TOGETHER)
    } | dict(zip(EXPERT_STRIDES, w.strides, strict=True))


def _codes(w: Tensor | QuantizedRows, profile: Profile, *, experts: bool) -> dict[str, Constant]:
    """The constants of how a matrix is decoded."""
    if isinstance(w, Tensor):
        return {"DENSE": True}
    form, columns = w.form, w.columns
    unit_words = form.bits // 4
    whole = columns % (32 // unit_words) == 0
    affine = is_affine(form)
    return {
        "DENSE": False,
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


def decodes(form: WeightFormat, columns: int) -> bool:
    """Whether these kernels read a format: where eight neighbours share a row and a block."""
    return whole_blocks(form, columns, 8)


def is_affine(form: WeightFormat) -> bool:
    """Whether a code's value is the first one's and the code, exactly."""
    values = form.quant_map
    return bool(np.array_equal(values, values[0] + np.arange(values.size, dtype=np.float32)))


def _is_cpu(profile: Profile) -> bool:
    return profile.name == CPU_PROFILE.name


class Subgroup:
    """For software adapters: each invocation has four columns, rows of x are broadcast."""

    def fits(self, problem: FewRows, profile: Profile) -> bool:
        """Where subgroups are known."""
        return profile.textures

    def launch(self, g: Graph, problem: FewRows) -> None:
        """Adds the launch."""
        threads, units = g.profile.subgroup_size, problem.x.units(8)
        span = next(n for n in (8, 4, 2, 1) if units % n == 0 and n <= threads)
        constants: dict[str, Constant] = {"THREADS": threads, "SPAN": span}
        problem.launch(g, "few_rows/subgroup.wgsl", 4 * threads, constants)


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
        }
        problem.launch(g, "few_rows/shared.wgsl", 4 * groups, constants)


FEW_ROWS: Kernel[FewRows] = Kernel("few_rows", (Subgroup(), Shared()))
KERNELS = (FEW_ROWS,)
