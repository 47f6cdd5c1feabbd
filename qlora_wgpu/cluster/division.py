"""Which worker computes which block: decisions alone, with no network and no clock of their own.

A block is a micro-batch. What it gives is the same whoever computes it, so that a block may be
given to two workers, and the first result counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from qlora_wgpu.cluster.choosing import Step, copies, first_choices
from qlora_wgpu.cluster.crew import Crew
from qlora_wgpu.cluster.orders import Order, Work, in_order
from qlora_wgpu.cluster.records import Held, Record


class Division:
    """Gives a step's blocks to workers.

    ``measured`` gives a block to whoever is expected to be done with it first, by what each took
    so far; ``fixed`` gives block b to worker b mod n in the order of their names. Either way,
    blocks of a worker that is gone, or that takes far longer than it should, go to others. The
    latter is suspect: it gets nothing more until it has answered.
    """

    def __init__(self, *, fixed: bool = False, queued: int = 1, window: int = 4) -> None:
        """Knows no worker and has no step yet.

        Args:
            fixed: Whether what was measured does not count.
            queued: Blocks that wait at a worker while it computes another.
            window: For each worker, how many blocks past the first that is not done may be given
                out: results that wait for their turn take memory.
        """
        self._fixed = fixed
        self._slots = 1 + queued
        self._window = window
        self._crew = Crew()
        self._step = Step()
        self._tickets = itertools.count(1)

    # -- workers ---------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """A worker has come."""
        self._crew.records.setdefault(name, Record(name))

    def remove(self, name: str) -> None:
        """A worker is gone, and with it what it was given."""
        record = self._crew.records.pop(name, None)
        for held in list(record.held.values()) if record else []:
            self._step.want(held.order, self._crew)

    def suspect(self, name: str) -> None:
        """A worker gets nothing more until it has answered; others compute what it has."""
        record = self._crew.records.get(name)
        if record is not None and not record.is_suspect:
            record.is_suspect = True
            for held in record.held.values():
                self._step.want(held.order, self._crew)

    def answered(self, name: str) -> None:
        """A worker is there, and may have blocks: what it had has come, or will never come."""
        record = self._crew.records.get(name)
        if record is not None and record.is_suspect:
            record.is_suspect = False
            record.held.clear()  # others compute it

    @property
    def suspects(self) -> list[str]:
        """Workers that have not answered for too long."""
        return self._crew.suspects

    @property
    def usable(self) -> list[str]:
        """Workers that may have blocks, in the order of their names."""
        return self._crew.usable

    def work(self) -> dict[str, Work]:
        """What each worker has done since this was asked last, in the order of their names."""
        records = self._crew.records
        return {name: records[name].work() for name in sorted(records, key=in_order)}

    # -- a step ----------------------------------------------------------------------------

    def begin(self, sizes: Sequence[int], kind: str = "gradient") -> None:
        """A step begins; what is still on its way for an older one does not count any more.

        Args:
            sizes: Tokens of each block, padding included: what it takes is in proportion.
            kind: What is computed of each; another kind takes another time.
        """
        self._crew.forgive(self._step.kind)
        self._step = Step(
            self._step.number + 1, kind, sizes, self.usable, wanted=list(range(len(sizes)))
        )

    @property
    def is_complete(self) -> bool:
        """Whether every block has a result."""
        return self._step.is_complete

    def next(self, now: float) -> list[Order]:
        """What is to be given to whom at this moment; it counts as given."""
        step, crew = self._step, self._crew
        for record in list(crew.records.values()):
            if not record.is_suspect and now > crew.due(record):
                self.suspect(record.name)
        chosen = first_choices(
            step, crew, now, fixed=self._fixed, slots=self._slots, window=self._window
        )
        orders = [self._give(name, block, now) for name, block in chosen]
        return orders + [self._give(name, block, now) for name, block in copies(step, crew, now)]

    def begun(self, order: Order, now: float) -> None:
        """A worker has all that a block needs: what it takes from now on is computing."""
        record, held = self._held(order)
        if record is not None and held is not None:
            record.begun(held, now)

    def done(self, order: Order, now: float, seconds: float) -> bool:
        """A block has come back; whether it is this step's and the first result for it.

        Args:
            order: As it was given.
            now: The time.
            seconds: What the worker says that it has computed for.
        """
        counts = order.step == self._step.number and order.block not in self._step.finished
        record, held = self._held(order)
        if record is not None and held is not None:
            timed = held.kind == self._step.kind  # an evaluation's, late, is not a step's
            record.done(held, now, seconds, counts=counts, timed=timed)
        if counts:  # where it was late, it may be that nobody else has begun it
            self._step.finish(order.block)
        return counts

    def failed(self, order: Order) -> None:
        """A block does not come back: it is given again."""
        record = self._crew.records.get(order.worker)
        if record is not None:
            record.held.pop(order.ticket, None)
        self._step.want(order, self._crew)

    def doubt(self, order: Order) -> bool:
        """A result that counted is not to be believed; whether another worker can tell.

        The block is computed anew, then, and not by this worker.
        """
        self._step.doubted.setdefault(order.block, set()).add(order.worker)
        if not self.is_left_to_others(order.block):
            return False
        self._step.finished.discard(order.block)
        self._step.want(order, self._crew)
        return True

    def is_left_to_others(self, block: int) -> bool:
        """Whether a doubted block may still be computed by a worker that is not doubted for it."""
        return bool(self._step.able(block, self.usable))

    def settle(self, block: int) -> None:
        """A doubted result has to do after all."""
        self._step.finish(block)

    # -- within ----------------------------------------------------------------------------

    def _held(self, order: Order) -> tuple[Record | None, Held | None]:
        record = self._crew.records.get(order.worker)
        return record, None if record is None else record.held.get(order.ticket)

    def _give(self, name: str, block: int, now: float) -> Order:
        step = self._step
        step.take(block)
        order = Order(next(self._tickets), step.number, name, block)
        record = self._crew.records[name]
        record.held[order.ticket] = Held(order, step.kind, step.sizes[block], now)
        record.was_idle = False
        return order
