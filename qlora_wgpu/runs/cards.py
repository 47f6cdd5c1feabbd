"""One training on cards of the usual sizes: what has room on each, what waits, and what that costs.

All cards are planned as a common GPU. Times are reckoned, never measured: operations over `FLOPS`,
bytes of the card's memory over `BYTES`, traffic over `LINK`, one after the other. So a slow-down is
an upper bound for such a card.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.memory_size import room_of
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.limits import GIB
from qlora_wgpu.model.fit import Fit
from qlora_wgpu.model.fitting import Search
from qlora_wgpu.model.residency import Residency
from qlora_wgpu.runs.what_fits import MOST_TOKENS, SEQ_STEP, largest_fitting
from qlora_wgpu.runs.workload import Target, Workload

SIZES = (4, 6, 8, 12, 16, 24, 48, 80)  # GB, as cards are sold: 2**30 bytes each
FLOPS, BYTES = 1e13, 5e11  # a second, of products and of the card's memory


@dataclass(frozen=True)
class CardPlan:
    """A training on a card of some size.

    Attributes:
        gib: The card's memory in GiB.
        room: Bytes of it that training may take.
        resident_seq: Most tokens of one row with all weights on the card, layers recomputed; 0 for
            none.
        longest_seq: Most tokens of one row with all in host memory that can be; 0 for none. Of very
            small models other ways may have room for a few more.
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
    here = Target()
    resident = here.layout(workload)
    row = replace(workload, batch=1, checkpointing=True)

    @lru_cache
    def on_card(steps: int) -> int | None:
        return here.total(replace(row, seq=steps * SEQ_STEP))

    all_waiting = Residency.least(resident.num_layers)
    # Blocks of a small head take more than it does itself.
    ways = [resident.waiting(replace(all_waiting, streamed_head=head)) for head in (True, False)]

    @lru_cache
    def with_host(steps: int) -> int | None:
        options = replace(row, seq=steps * SEQ_STEP).options
        try:
            totals = [sum(way.memory(options).values()) for way in ways]
        except OutOfMemoryError:
            return None
        return min(filter(None, [on_card(steps), *totals]))

    most = MOST_TOKENS // SEQ_STEP
    kept = replace(workload, checkpointing=False).options
    search = Search(resident, kept, workload.accumulation, (FLOPS, BYTES))
    seconds = workload.accumulation * _computing(resident.step(kept).plan)
    for gib in SIZES:
        room = room_of(gib * GIB)
        fitted = _fitted(search, room)
        yield CardPlan(
            gib,
            room,
            largest_fitting(on_card, room, most) * SEQ_STEP,
            largest_fitting(with_host, room, most) * SEQ_STEP,
            fitted,
            None if fitted is None else _seconds(fitted, workload.accumulation) / seconds,
        )
        if fitted is not None and not fitted.options.checkpointing and not fitted.moved:
            return


def _fitted(search: Search, room: int) -> Fit | None:
    try:
        return search.within(room)
    except OutOfMemoryError:
        return None


def _seconds(fitted: Fit, accumulation: int) -> float:
    plan = fitted.layout.step(fitted.options).plan
    return accumulation * _computing(plan) + fitted.seconds


def _computing(plan: Plan) -> float:
    return plan.flops / FLOPS + plan.passed_bytes / BYTES
