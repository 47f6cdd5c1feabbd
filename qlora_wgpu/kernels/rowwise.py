"""Kernels that take a row at a time: how rows are spread over invocations and workgroups."""

from __future__ import annotations

from qlora_wgpu.gpu.grid import Workgroups
from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.kernels.kernel import Change, Tunable

_LONG_ROW = 1 << 14  # columns, as a vocabulary has them
_MOST_HELD = 8  # units, for straight-line code that software adapters compile quickly
_HELD_ROWS = 4  # of a workgroup, which has its price, too
_MOST_THREADS = 1024  # of a workgroup, where the GPU allows them


def row_constants(g: Graph, columns: int = 0) -> dict[str, Constant]:
    """The constants that ``common/row_reduce.wgsl`` and its users need.

    Args:
        g: The graph, in whose profile they are.
        columns: Length of the rows, of which long ones get more threads.
    """
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


def held_row(g: Graph, units: int) -> dict[str, Constant]:
    """Whether an invocation holds its units of a row, TURNS of them, instead of reading them again.

    Then a workgroup has EACH rows, one after the other, for which it reads a weight once.

    Args:
        g: The graph, in whose profile it is.
        units: Units of eight elements of a row.
    """
    turns = ceil_div(units, g.profile.threads_per_row)
    held = g.profile.textures and turns <= _MOST_HELD
    return {"HELD": held, "TURNS": turns, "EACH": _HELD_ROWS if held else 1}


def row_workgroups(g: Graph, rows: int, each: Constant = 1) -> Workgroups:
    """Workgroups that cover so many rows, ``each`` at a time."""
    return (ceil_div(rows, g.profile.rows_per_group * int(each)), 1, 1)


def _changes(profile: Profile) -> tuple[Change, ...]:
    if profile.textures or profile.name == "cpu":
        return ()
    return tuple({"threads_per_row": threads} for threads in (32, 64, 256))


TUNABLES = (Tunable("rows", lambda launch: "ROWS" in launch.constants, _changes),)
