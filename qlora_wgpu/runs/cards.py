"""One training on cards of the usual sizes: what has room on each, what waits, and what that costs.

All cards are planned as a common GPU. Times are reckoned, never measured: operations over `FLOPS`,
bytes of the card's memory over `BYTES`, traffic over `LINK`, one after the other. So a slow-down is
an upper bound for such a card.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.memory import room_of
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.limits import GIB
from qlora_wgpu.model.budget import Fit, Search
from qlora_wgpu.model.model_plan import ModelLayout
from qlora_wgpu.model.offload_plan import Residency
from qlora_wgpu.runs.what_fits import LENGTHS, largest_fitting
from qlora_wgpu.runs.workload import Target, Totals, Workload

SIZES = (4, 6, 8, 12, 16, 24, 48, 80)  # GB, as cards are sold: 2**30 bytes each
FLOPS, BYTES = 1e13, 5e11  # a second, of products and of the card's memory
_FEW_LAYERS = 8
_NEARLY = 1.1  # like ways differ by less


@dataclass(frozen=True)
class CardPlan:
    """A training on a card of some size.

    Attributes:
        gib: The card's memory in GiB.
        room: Bytes of it that training may take.
        resident_seq: The longest of ``LENGTHS`` that a row may have with all weights on the card,
            layers recomputed; 0 for none.
        longest_seq: The same with all in host memory that can be. The next longer one has no room
            in any way.
        fitted: How the planned training keeps to the card; None where it cannot.
        slow_down: How many times as long its step takes as with everything on a card and nothing
            recomputed, if no traffic is hidden; None where it does not fit.
    """

    gib: int
    room: int
    resident_seq: int
    longest_seq: int
    fitted: Fit | None
    slow_down: float | None


def plans_for_cards(workload: Workload) -> tuple[CardPlan, ...]:
    """Plans a training for cards from 4 to 80 GB, until a card has room for everything."""
    return tuple(_plans(workload))


def _plans(workload: Workload) -> Iterator[CardPlan]:
    totals = Target().totals(replace(workload, batch=1, checkpointing=True))
    resident = totals.layout
    waiting = _Waiting(totals)
    kept = replace(workload, checkpointing=False).options
    search = Search(resident, kept, workload.accumulation, (FLOPS, BYTES))
    seconds = workload.accumulation * _computing(resident.sized(kept).plan)
    for gib in SIZES:
        room = room_of(gib * GIB)
        fitted = _fitted(search, room)
        resident_seq = largest_fitting(lambda n: totals(seq=n), room, LENGTHS)
        yield CardPlan(
            gib,
            room,
            resident_seq,
            waiting.longest(room, resident_seq),
            fitted,
            None if fitted is None else _seconds(fitted, workload.accumulation) / seconds,
        )
        if fitted is not None and not fitted.options.checkpointing and not fitted.moved:
            return


class _Waiting:
    """What rows of several lengths take with all in host memory that can wait."""

    def __init__(self, resident: Totals) -> None:
        layout = resident.layout
        self._resident = resident
        # A head's blocks, and gradients of all rows, may take more than it does itself.
        self._ways = [self._like(layout, streamed_head=head) for head in layout.head_ways]

    def _like(self, layout: ModelLayout, *, streamed_head: bool) -> list[Totals]:
        """A way that takes about the least, and those that may take a little less."""
        way = replace(Residency.least(layout.num_layers), streamed_head=streamed_head)
        ways = [way, replace(way, remakes=False)]
        return [self._resident.waiting(each) for each in ways]

    def longest(self, room: int, found: int) -> int:
        """The longest row that has room, of those that are tried.

        Args:
            room: Bytes on the device.
            found: The longest that has room without.
        """
        for first, *_ in self._ways:
            longer = [length for length in LENGTHS if length > found]
            found = largest_fitting(lambda n: first(seq=n), room, longer) or found  # noqa: B023
        for seq in LENGTHS:
            if seq > found:
                if not self._fits_otherwise(seq, room):
                    break
                found = seq
        return found

    def _fits_otherwise(self, seq: int, room: int) -> bool:
        if self._resident.layout.num_layers <= _FEW_LAYERS:  # any may be the least of small models
            options = self._resident.options(seq=seq)
            return Search(self._resident.layout, options).least().total <= room
        for first, *others in self._ways:
            taken = first(seq=seq)
            if taken is None or taken > _NEARLY * room:
                continue
            for way in others:
                other = way(seq=seq)
                if other is not None and other <= room:
                    return True
        return False


def _fitted(search: Search, room: int) -> Fit | None:
    try:
        return search.within(room)
    except OutOfMemoryError:
        return None


def _seconds(fitted: Fit, accumulation: int) -> float:
    plan = fitted.layout.sized(fitted.options).plan
    return accumulation * _computing(plan) + fitted.seconds


def _computing(plan: Plan) -> float:
    return plan.flops / FLOPS + plan.passed_bytes / BYTES
