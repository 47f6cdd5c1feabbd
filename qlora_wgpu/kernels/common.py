"""What kernels have in common: variants, grids over rows, dropout masks, experts' rows."""

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

    fits: Callable[[ProblemT, Profile], bool]  # whether it solves one on a GPU of a profile
    launch: Callable[[Graph, ProblemT], None]  # adds the launches that do


def always(problem: object, profile: Profile) -> bool:
    """That a variant solves every problem everywhere."""
    return True


@dataclass(frozen=True)
class Kernel(Generic[ProblemT]):
    """A family of kernels."""

    name: str  # shown to users; its shaders' folder
    variants: tuple[Variant[ProblemT], ...]  # the first that fits runs

    def launch(self, g: Graph, problem: ProblemT) -> None:
        """Solves a problem."""
        for variant in self.variants:
            if variant.fits(problem, g.profile):
                variant.launch(g, problem)
                return
        raise GraphError(f"{self.name}: no variant fits {problem}")


@dataclass(frozen=True)
class Tunable:
    """A choice of a tuner about some kernels."""

    name: str  # shown to users
    concerns: Callable[[Launch], bool]  # whether a launch depends on it
    # Fields of a profile to try, besides the profile as it is.
    changes: Callable[[Profile], tuple[Change, ...]]


_LONG_ROW = 1 << 14  # columns, as a vocabulary has them
_MOST_HELD = 8  # units, for straight-line code that software adapters compile quickly
_HELD_ROWS = 4  # of a workgroup, which has its price, too
_MOST_THREADS = 1024  # of a workgroup, where the GPU allows them


def row_constants(g: Graph, columns: int = 0) -> dict[str, Constant]:
    """The constants that ``common/row_reduce.wgsl`` and its users need."""
    threads = g.profile.threads_per_row
    if columns >= _LONG_ROW and threads > 1 and not g.profile.textures:
        allowed = min(g.profile.limits.invocations, _MOST_THREADS)
        threads = max(threads, 1 << allowed.bit_length() - 1)  # they are halved again and again
    return {
        "THREADS": threads,
        "ROWS": g.profile.rows_per_group,
        "ONE_THREAD": threads == 1,
        "SUBGROUP": g.profile.textures,
    }


def one_row(g: Graph) -> dict[str, Constant]:
    """The same of kernels whose workgroups have a row each."""
    constants = row_constants(g)
    del constants["ROWS"]
    return constants


def held_row(g: Graph, units: int) -> dict[str, Constant]:
    """Whether an invocation holds its units of a row, TURNS of them, instead of reading them again.

    Then a workgroup has EACH rows, one after the other, for which it reads a weight once.
    """
    turns = ceil_div(units, g.profile.threads_per_row)
    held = g.profile.textures and turns <= _MOST_HELD
    return {"HELD": held, "TURNS": turns, "EACH": _HELD_ROWS if held else 1}


def row_workgroups(g: Graph, rows: int, each: Constant = 1) -> Workgroups:
    """Workgroups that cover so many rows, ``each`` at a time."""
    return (ceil_div(rows, g.profile.rows_per_group * int(each)), 1, 1)


def _changes(profile: Profile) -> tuple[Change, ...]:
    if profile.is_software:
        return ()
    return tuple({"threads_per_row": threads} for threads in (32, 64, 256))


TUNABLES = (Tunable("rows", lambda launch: "ROWS" in launch.constants, _changes),)


@dataclass(frozen=True)
class DropoutMask:
    """Which elements of a module's input a training batch drops."""

    probability: float  # that an element is dropped
    key: int  # tells the module's masks from those of others


def dropout_params(mask: DropoutMask | None) -> dict[str, int | float]:
    """The uniform fields that ``common/dropout.wgsl`` reads."""
    if mask is None:
        return {"module_key": 0, "keep_below": 0, "keep_scale": 1.0}
    kept = 1 - mask.probability
    return {
        "module_key": mask.key,
        "keep_below": min(round(kept * 2**32), 2**32 - 1),
        "keep_scale": 1 / kept,
    }


EXPERT_TILE = 64  # rows of one expert; a multiple of what any product's workgroup makes
NEW_TOKENS_TILE = 1  # of new tokens, whose products make each row by itself


@dataclass(frozen=True)
class ExpertTiles:
    """Which expert each tile of rows belongs to, and whose weights are at hand."""

    experts: Tensor  # uint32 (tiles)
    rows: Tensor  # uint32 (2 · experts), the first row of each expert and the one past its last
    first: int  # the first expert at hand
    count: int  # how many are
    tile: int = EXPERT_TILE  # rows of a tile


def expert_params(experts: ExpertTiles | None, lora_stride: int) -> dict[str, int]:
    """Parameters of a kernel whose rows may belong to experts.

    ``lora_stride`` is from one expert's A or B to the next one's, in the units that the kernel
    counts in.
    """
    if experts is None:
        return {"expert0": 0, "experts": 1, "lora_expert": 0}
    return {"expert0": experts.first, "experts": experts.count, "lora_expert": lora_stride}


def expert_constants(
    experts: ExpertTiles | None, tensors: dict[str, Tensor | None]
) -> dict[str, Constant]:
    """Constants of such a kernel; binds what it looks up."""
    if experts is None:
        return {}
    tensors["tile_experts"] = experts.experts
    return {"EXPERT_TILE": experts.tile}


def expert_count(expert_rows: Tensor | None) -> int:
    """The number of experts that a reduction over rows is for."""
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
    """Adds up the parts of x, which lie one below the other, into columns of y.

    x is (parts · rows, columns) float32; y is written, or with ``accumulate`` added to, from
    column0, a multiple of eight, on. The bias is of all of y's columns, the residual of y's layout.
    """
    if x.rows != parts * y.rows or column0 + x.columns > y.columns or column0 % 8:
        raise GraphError(f"sum: {x} is not {parts} times columns of {y} from {column0} on")
    units = y.rows * x.units(4)
    g.launch(
        _SUM_PARTS,
        units,
        {"x": x, "y": y, "bias": bias, "residual": residual},
        {"units": units, "parts": parts, "y_unit0": column0 // 4},
        {"ACCUMULATE": accumulate},
    )
