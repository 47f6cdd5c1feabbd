"""Which worker computes which block: decisions alone, with no network and no clock of their own.

A block is a micro-batch. What it gives is the same whoever computes it, so that a block may be
given to two workers, and the first result counts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

# ---- blocks and what was measured ----------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """A block that is given to a worker."""

    ticket: int  # a number of its own
    step: int  # the number of the step, of all that were begun
    worker: str  # the worker's name
    block: int  # the block's place in its step


@dataclass(frozen=True)
class Work:
    """What a worker has done in a while."""

    tokens: int  # of the blocks that counted, padding included
    timed_tokens: int  # of the blocks whose time is known: not of those for which it compiled
    seconds: float  # that it took for these
    is_suspect: bool  # whether it has not answered for too long


def in_order(name: str) -> tuple[int, int | str]:
    """The order of workers' names: numbers as numbers."""
    return (0, int(name)) if name.isdecimal() else (1, name)


_NEW = 0.3  # weight of a new measurement
_MOST = 4.0  # by how much one measurement may be slower than what was known


@dataclass
class Held:
    """A block that a worker has been given and has not answered."""

    order: Order  # as it was given
    kind: str  # what is computed of it
    size: int  # its tokens, padding included
    sent: float  # when it was given
    begun: float | None = None  # when the worker had the parameters that it needs; None before that


@dataclass
class Speed:
    """How fast a worker computes one kind of block."""

    pace: float | None = None  # seconds a token; None until a size was computed a second time
    # The fewest seconds a token of blocks whose size was new, compiling included
    first: float | None = None
    known: set[int] = field(default_factory=set)  # sizes that it has computed

    def measure(self, size: int, seconds: float) -> None:
        """Notes how long a block took."""
        measured = max(seconds, 1e-6) / size
        if size not in self.known:
            self.known.add(size)
            self.first = measured if self.first is None else min(self.first, measured)
            return
        if self.pace is not None:
            measured = min(measured, _MOST * self.pace)
        self.pace = _mean(self.pace, measured)


@dataclass
class Record:
    """A worker, as a division knows it."""

    name: str  # the worker's
    # By the kind of block
    speeds: defaultdict[str, Speed] = field(default_factory=lambda: defaultdict(Speed))
    # Seconds until it has the parameters; None where that is not known
    writing: float | None = None
    last_done: float = 0.0  # when it answered last
    is_suspect: bool = False  # whether it has not answered for too long
    # What it has been given, by ticket, in the order of giving
    held: dict[int, Held] = field(default_factory=dict)
    was_idle: bool = True  # whether it got nothing in the present step
    _tokens: int = 0
    _timed_tokens: int = 0
    _seconds: float = 0.0

    def begun(self, held: Held, now: float) -> None:
        """The worker has all that a block needs."""
        self.writing = _mean(self.writing, now - held.sent)
        held.begun = now

    def done(self, held: Held, now: float, seconds: float, *, counts: bool, timed: bool) -> None:
        """A block has come back."""
        speed = self.speeds[held.kind]
        if held.size in speed.known:
            if held.begun is not None:  # the way back counts, and waiting for others does not
                seconds = now - max(held.begun, self.last_done)
            self._timed_tokens += held.size if timed else 0
            self._seconds += seconds if timed else 0.0
        speed.measure(held.size, seconds)
        self._tokens += held.size if counts else 0
        del self.held[held.order.ticket]
        self.is_suspect, self.last_done = False, now

    def work(self) -> Work:
        """What it has done since this was asked last."""
        work = Work(self._tokens, self._timed_tokens, self._seconds, self.is_suspect)
        self._tokens, self._timed_tokens, self._seconds = 0, 0, 0.0
        return work


def _mean(known: float | None, new: float) -> float:
    return new if known is None else known + _NEW * (new - known)


# ---- who gets which block ------------------------------------------------------------------------

_LATE = 2.0  # times what is expected, after which somebody else computes a block, too
_LEAST = 2.0  # seconds that a block may always take
_FIRST = 20.0  # more for what a worker has not done before: it compiles
_UNKNOWN = 60.0  # for the first block of all
_FORGIVEN = 0.1  # of the difference to the others, for each step in which a worker did nothing


class Crew:
    """The workers that there are.

    Attributes:
        records: By a worker's name.
    """

    def __init__(self) -> None:
        """Knows nobody."""
        self.records: dict[str, Record] = {}

    @property
    def suspects(self) -> list[str]:
        """Workers that have not answered for too long."""
        return sorted(record.name for record in self.records.values() if record.is_suspect)

    @property
    def usable(self) -> list[str]:
        """Workers that may have blocks, in the order of their names."""
        names = (record.name for record in self.records.values() if not record.is_suspect)
        return sorted(names, key=in_order)

    def pace(self, record: Record, kind: str) -> float:
        """Seconds a token that a worker is expected to take.

        That is what was measured; of one that has compiled for all that it did, what the others
        take, and no more than it took then. Where all have, the fewest that one took.
        """
        own, all_speeds = record.speeds[kind], [r.speeds[kind] for r in self.records.values()]
        if own.pace is not None:
            return own.pace
        known = [speed.pace for speed in all_speeds if speed.pace is not None]
        if known:
            mean = sum(known) / len(known)
            return mean if own.first is None else min(own.first, mean)
        return min((speed.first for speed in all_speeds if speed.first is not None), default=1.0)

    def end(self, record: Record, now: float) -> float:
        """When a worker is expected to be done with what it has."""
        end = now
        for index, held in enumerate(record.held.values()):
            needed = held.size * self.pace(record, held.kind)
            end = end + needed if index else max(now, self._start(record, held) + needed)
        return end

    def _start(self, record: Record, held: Held) -> float:
        """When a worker has, or should have, begun its first block."""
        begun = held.sent + (record.writing or 0.0) if held.begun is None else held.begun
        return max(begun, record.last_done)

    def due(self, record: Record, *, compiles: bool = True) -> float:
        """When the first block that a worker has is too late."""
        held = next(iter(record.held.values()), None)
        if held is None:
            return float("inf")
        start = max(held.sent if held.begun is None else held.begun, record.last_done)
        writing = (record.writing or 0.0) if held.begun is None else 0.0
        if all(r.speeds[held.kind].first is None for r in self.records.values()):
            return start + _UNKNOWN
        is_new = held.size not in record.speeds[held.kind].known
        is_new |= held.begun is None and record.writing is None
        expected = writing + held.size * self.pace(record, held.kind)
        grace = _FIRST if is_new and compiles else 0.0
        return start + max(_LEAST, _LATE * expected) + grace

    def forgive(self, kind: str) -> None:
        """One that was too slow to get any work is tried again in the end: it may be free now."""
        paces = [r.speeds[kind].pace for r in self.records.values()]
        fastest = min((pace for pace in paces if pace is not None), default=0.0)
        for record in self.records.values():
            speed = record.speeds[kind]
            if record.was_idle and speed.pace is not None:
                speed.pace += _FORGIVEN * (fastest - speed.pace)
            record.was_idle = not record.held


Choice = tuple[str, int]  # a worker's name and a block


@dataclass
class Step:
    """The blocks of a step, and what has become of them."""

    number: int = 0  # of all steps that were begun
    kind: str = ""  # what is computed of each block
    sizes: Sequence[int] = ()  # tokens of each block, padding included
    turn: Sequence[str] = ()  # workers in whose turn blocks are given, where that is fixed
    wanted: list[int] = field(default_factory=list)  # blocks that nobody computes, in their order
    finished: set[int] = field(default_factory=set)  # blocks that have a result
    # By block, the workers whose result for it is not believed
    doubted: dict[int, set[str]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every block has a result."""
        return len(self.finished) == len(self.sizes)

    def able(self, block: int, names: Sequence[str]) -> list[str]:
        """Those of some workers who are not doubted for a block."""
        return [name for name in names if name not in self.doubted.get(block, ())]

    def take(self, block: int) -> None:
        """A block is no longer wanted."""
        if block in self.wanted:
            self.wanted.remove(block)

    def finish(self, block: int) -> None:
        """A block has a result."""
        self.finished.add(block)
        self.take(block)

    def want(self, order: Order, crew: Crew) -> None:
        """Gives a block out again, unless it is an older step's, done, or with somebody else."""
        block = order.block
        if order.step != self.number or block in self.finished or block in self.wanted:
            return
        usable = set(self.able(block, crew.usable))
        if not self.is_with(usable, block, crew):
            self.wanted.append(block)
            self.wanted.sort()

    def is_with(self, names: set[str], block: int, crew: Crew) -> bool:
        """Whether one of some workers has a block of this step."""
        return any(
            (held.order.step, held.order.block) == (self.number, block)
            for name in names
            for held in crew.records[name].held.values()
        )


def first_choices(
    step: Step, crew: Crew, now: float, *, fixed: bool, slots: int, window: int
) -> list[Choice]:
    """Who gets which of the blocks that nobody computes."""
    usable = crew.usable
    first = min((i for i in range(len(step.sizes)) if i not in step.finished), default=0)
    limit = first + window * max(len(usable), 1)
    free = {name: slots - len(crew.records[name].held) for name in usable}
    ends = {name: crew.end(crew.records[name], now) for name in usable}
    paces = {name: crew.pace(crew.records[name], step.kind) for name in usable}
    chosen = []
    for block in step.wanted:
        if block >= limit or not any(count > 0 for count in free.values()):
            break
        able, size = step.able(block, usable), step.sizes[block]
        if not able:
            continue
        if fixed:
            name = _in_turn(step, block, able)
        else:
            name = min(able, key=lambda name: ends[name] + size * paces[name])
        ends[name] += size * paces[name]
        if free[name] > 0:  # else it waits for this worker, who is done sooner than others
            chosen.append((name, block))
        free[name] -= 1
    return chosen


def _in_turn(step: Step, block: int, able: list[str]) -> str:
    count = len(step.turn)
    turns = (step.turn[(block + i) % count] for i in range(count))
    return next((name for name in turns if name in able), able[block % len(able)])


def copies(step: Step, crew: Crew, now: float) -> list[Choice]:
    """Who, of those that have nothing to do, gets a block that another may be stuck with.

    That one may just as well be compiling, so that it is not suspect yet.
    """
    if step.wanted:
        return []
    idle = [name for name in crew.usable if not crew.records[name].held]
    stuck = {
        record.name
        for record in crew.records.values()
        if record.is_suspect or now > crew.due(record, compiles=False)
    }
    others = set(crew.records) - stuck
    chosen: list[Choice] = []
    for name in sorted(stuck, key=in_order):
        record = crew.records[name]
        for held in record.held.values() if not record.is_suspect else ():
            block, able = held.order.block, step.able(held.order.block, idle)
            is_open = held.order.step == step.number and block not in step.finished
            is_chosen = block in [chosen_block for _, chosen_block in chosen]
            if able and is_open and not is_chosen and not step.is_with(others, block, crew):
                copier = _one_that_knows(able, step.kind, held.size, crew)
                idle.remove(copier)
                chosen.append((copier, block))
    return chosen


def _one_that_knows(able: list[str], kind: str, size: int, crew: Crew) -> str:
    """One that has done such a block before, if there is one: it need not compile for it."""
    return min(able, key=lambda name: size not in crew.records[name].speeds[kind].known)


# ---- the division of a step ----------------------------------------------------------------------


class Division:
    """Gives a step's blocks to workers.

    ``measured`` gives a block to whoever is expected to be done with it first, by what each took
    so far; ``fixed`` gives block b to worker b mod n in the order of their names. Either way,
    blocks of a worker that is gone, or that takes far longer than it should, go to others. The
    latter is suspect: it gets nothing more until it has answered.
    """

    def __init__(self, *, fixed: bool = False, queued: int = 1, window: int = 4) -> None:
        """Knows no worker and has no step yet."""
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
        """A step begins; what is still on its way for an older one does not count any more."""
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
        """A block has come back; whether it is this step's and the first result for it."""
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
