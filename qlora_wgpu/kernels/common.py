"""Common parts of kernels: variants, grids over rows, dropout masks, experts' rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.wgsl import Constant, Workgroups
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.launch import GraphError, Launch
from qlora_wgpu.graph.tensor import Tensor, ceil_div

ProblemT = TypeVar("ProblemT")
Change = Mapping[str, Any]


@dataclass(frozen=True)
class Variant(Generic[ProblemT]):
    """One way of solving a problem."""

    fits: Callable[[ProblemT, Profile], bool]  # whether it supports a problem with a profile
    launch: Callable[[Graph, ProblemT], None]  # adds its launches


def always(problem: object, profile: Profile) -> bool:
    """For variants that support every problem and profile."""
    return True


@dataclass(frozen=True)
class Kernel(Generic[ProblemT]):
    """A family of kernels."""

    name: str  # also the folder of its shaders
    variants: tuple[Variant[ProblemT], ...]  # the first that fits runs

    def launch(self, g: Graph, problem: ProblemT) -> None:
        for variant in self.variants:
            if variant.fits(problem, g.profile):
                variant.launch(g, problem)
                return
        raise GraphError(f"{self.name}: no variant supports {problem}")


@dataclass(frozen=True)
class Tunable:
    """A choice of the tuner for some kernels."""

    name: str  # shown to users
    concerns: Callable[[Launch], bool]  # whether a launch depends on it
    # Fields of a profile to try, in addition to the unchanged profile.
    changes: Callable[[Profile], tuple[Change, ...]]


_LONG_ROW = 1 << 14  # columns, such as a vocabulary's
_MOST_HELD = 8  # units: limits straight-line code to what software GPUs compile quickly
_HELD_ROWS = 4  # rows per workgroup, which is a trade-off
_MOST_THREADS = 1024  # per workgroup, if the GPU supports them


def row_constants(g: Graph, columns: int = 0) -> dict[str, Constant]:
    threads = g.profile.threads_per_row
    if columns >= _LONG_ROW and threads > 1 and not g.profile.textures:
        allowed = min(g.profile.limits.invocations, _MOST_THREADS)
        threads = max(threads, 1 << allowed.bit_length() - 1)  # a power of two, for the reduction
    return {
        "THREADS": threads,
        "ROWS": g.profile.rows_per_group,
        "ONE_THREAD": threads == 1,
        "SUBGROUP": g.profile.textures,
    }


def one_row(g: Graph) -> dict[str, Constant]:
    """The same for kernels with one row per workgroup."""
    constants = row_constants(g)
    del constants["ROWS"]
    return constants


def held_row(g: Graph, units: int) -> dict[str, Constant]:
    """Whether an invocation holds its TURNS units of a row instead of reading them again.

    Then a workgroup processes EACH rows in sequence, for which it reads a weight once.
    """
    turns = ceil_div(units, g.profile.threads_per_row)
    held = g.profile.textures and turns <= _MOST_HELD
    return {"HELD": held, "TURNS": turns, "EACH": _HELD_ROWS if held else 1}


def row_workgroups(g: Graph, rows: int, each: Constant = 1) -> Workgroups:
    return (ceil_div(rows, g.profile.rows_per_group * int(each)), 1, 1)


def _changes(profile: Profile) -> tuple[Change, ...]:
    if profile.is_software:
        return ()
    return tuple({"threads_per_row": threads} for threads in (32, 64, 256))


TUNABLES = (Tunable("rows", lambda launch: "ROWS" in launch.constants, _changes),)


@dataclass(frozen=True)
class DropoutMask:
    """The dropout of a module's input."""

    probability: float  # that an element is dropped
    key: int  # distinguishes the module's masks from others'


def dropout_params(mask: DropoutMask | None) -> dict[str, int | float]:
    if mask is None:
        return {"module_key": 0, "keep_below": 0, "keep_scale": 1.0}
    kept = 1 - mask.probability
    return {
        "module_key": mask.key,
        "keep_below": min(round(kept * 2**32), 2**32 - 1),
        "keep_scale": 1 / kept,
    }


EXPERT_TILE = 64  # rows of one expert: a multiple of the rows of any product's workgroup
NEW_TOKENS_TILE = 1  # in decoding, where products compute each row by itself


@dataclass(frozen=True)
class ExpertTiles:
    """The expert of each tile of rows, and the experts whose weights are available."""

    experts: Tensor  # uint32 (tiles)
    rows: Tensor  # uint32 (2 · experts), the first row of each expert and the one past its last
    first: int  # the first available expert
    count: int  # number of available experts
    tile: int = EXPERT_TILE  # rows of a tile


def expert_params(experts: ExpertTiles | None, lora_stride: int) -> dict[str, int]:
    """Parameters of a kernel whose rows may belong to experts.

    ``lora_stride`` is the stride between experts' A or B, in the kernel's units.
    """
    if experts is None:
        return {"expert0": 0, "experts": 1, "lora_expert": 0}
    return {"expert0": experts.first, "experts": experts.count, "lora_expert": lora_stride}


def expert_constants(
    experts: ExpertTiles | None, tensors: dict[str, Tensor | None]
) -> dict[str, Constant]:
    """Constants of such a kernel; adds its tables to ``tensors``."""
    if experts is None:
        return {}
    tensors["tile_experts"] = experts.experts
    return {"EXPERT_TILE": experts.tile}


def expert_count(expert_rows: Tensor | None) -> int:
    return 1 if expert_rows is None else expert_rows.columns // 2


_SUM_PARTS = "tensor/sum_parts.wgsl"


def sum_parts(
    g: Graph,
    x: Tensor,
    y: Tensor,
    parts: int,
    *,
    accumulate: bool = False,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    column0: int = 0,
) -> None:
    """Sums the stacked parts of x into columns of y.

    x is (parts · rows, columns) float32; y is written, or with ``accumulate`` added to, from
    column0 on, a multiple of eight. The bias has all of y's columns, the residual y's layout.
    """
    if x.rows != parts * y.rows or column0 + x.columns > y.columns or column0 % 8:
        raise GraphError(f"sum: {x} is not {parts} parts of columns of {y} from {column0} on")
    units = y.rows * x.units(4)
    g.launch(
        _SUM_PARTS,
        units,
        {"x": x, "y": y, "bias": bias, "residual": residual},
        {"units": units, "parts": parts, "y_unit0": column0 // 4},
        {"ACCUMULATE": accumulate},
    )
