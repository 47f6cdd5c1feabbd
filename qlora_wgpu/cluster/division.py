"""Which worker computes which block: decisions alone, with no network and no clock of their own.

A block is a micro-batch. What it gives is the same whoever computes it, so that a block may be
given to two workers, and the first result counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

_LATE = 2.0  # times what is expected, after which somebody else computes a block, too
_LEAST = 2.0  # seconds that a block may always take
_FIRST = 20.0  # more for what a worker has not done before: it compiles
_UNKNOWN = 60.0  # for the first block of all
_NEW = 0.3  # weight of a new measurement
_MOST = 4.0  # by how much one measurement may be slower than what was known
_FORGIVEN = 0.1  # of the difference to the others, for each step in which a worker did nothing


@dataclass(frozen=True)
class Order:
    """A block that is given to a worker.

    Attributes:
        ticket: A number of its own.
        step: The number of the step, of all that were begun.
        worker: The worker's name.
        block: The block's place in its step.
    """

    ticket: int
    step: int
    worker: str
    block: int


@dataclass(frozen=True)
class Work:
    """What a worker has done in a while.

    Attributes:
        tokens: Of the blocks that counted, padding included.
        seconds: That it took for all that it computed.
        is_suspect: Whether it has not answered for too long.
    """

    tokens: int
    seconds: float
    is_suspect: bool


@dataclass
class _Held:
    """A block that a worker has been given and has not answered."""

    order: Order
    size: int
    sent: float
    begun: float | None = None


@dataclass
class _Worker:
    name: str
    pace: float | None = None  # seconds a token
    writing: float | None = None  # seconds until it has the parameters
    last_done: float = 0.0
    is_suspect: bool = False
    held: dict[int, _Held] = field(default_factory=dict)  # by ticket, in the order of giving
    known: set[int] = field(default_factory=set)  # sizes that it has computed
    was_idle: bool = True
    tokens: int = 0
    seconds: float = 0.0


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
        self._workers: dict[str, _Worker] = {}
        self._tickets = itertools.count(1)
        self._step = 0
        self._sizes: Sequence[int] = ()
        self._wanted: list[int] = []  # blocks that nobody computes, in their order
        self._done: set[int] = set()
        self._doubted: dict[int, set[str]] = {}  # by block, whose result is not believed
        self._turn: list[str] = []

    # -- workers ---------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """A worker has come."""
        self._workers.setdefault(name, _Worker(name))

    def remove(self, name: str) -> None:
        """A worker is gone, and with it what it was given."""
        worker = self._workers.pop(name, None)
        for held in list(worker.held.values()) if worker else []:
            self._want(held.order)

    def suspect(self, name: str) -> None:
        """A worker gets nothing more until it has answered; others compute what it has."""
        worker = self._workers.get(name)
        if worker is not None and not worker.is_suspect:
            worker.is_suspect = True
            for held in worker.held.values():
                self._want(held.order)

    def answered(self, name: str) -> None:
        """A worker is there, and may have blocks: what it had has come, or will never come."""
        worker = self._workers.get(name)
        if worker is not None and worker.is_suspect:
            worker.is_suspect = False
            worker.held.clear()  # others compute it

    @property
    def suspects(self) -> list[str]:
        """Workers that have not answered for too long."""
        return sorted(worker.name for worker in self._workers.values() if worker.is_suspect)

    @property
    def usable(self) -> list[str]:
        """Workers that may have blocks, in the order of their names."""
        names = (worker.name for worker in self._workers.values() if not worker.is_suspect)
        return sorted(names, key=in_order)

    def work(self) -> dict[str, Work]:
        """What each worker has done since this was asked last, in the order of their names."""
        result = {}
        for name in sorted(self._workers, key=in_order):
            worker = self._workers[name]
            result[name] = Work(worker.tokens, worker.seconds, worker.is_suspect)
            worker.tokens, worker.seconds = 0, 0.0
        return result

    # -- a step ----------------------------------------------------------------------------

    def begin(self, sizes: Sequence[int]) -> None:
        """A step begins; what is still on its way for an older one does not count any more.

        Args:
            sizes: Tokens of each block, padding included: what it takes is in proportion.
        """
        self._forgive()
        self._step += 1
        self._sizes = sizes
        self._wanted = list(range(len(sizes)))
        self._done = set()
        self._doubted = {}
        self._turn = self.usable

    @property
    def is_complete(self) -> bool:
        """Whether every block has a result."""
        return len(self._done) == len(self._sizes)

    def next(self, now: float) -> list[Order]:
        """What is to be given to whom at this moment; it counts as given."""
        for worker in self._workers.values():
            if not worker.is_suspect and now > self._due(worker):
                self.suspect(worker.name)
        orders = [self._give(*choice, now) for choice in self._choices(now)]
        return orders + [self._give(*choice, now) for choice in self._copies(now)]

    def begun(self, order: Order, now: float) -> None:
        """A worker has all that a block needs: what it takes from now on is computing."""
        held = self._held(order)
        if held is not None:
            worker = self._workers[order.worker]
            worker.writing = _mean(worker.writing, now - held.sent)
            held.begun = now

    def done(self, order: Order, now: float, seconds: float) -> bool:
        """A block has come back; whether it is this step's and the first result for it.

        Args:
            order: As it was given.
            now: The time.
            seconds: What the worker says that it has computed for.
        """
        worker, held = self._workers.get(order.worker), self._held(order)
        counts = order.step == self._step and order.block not in self._done
        if worker is not None and held is not None:
            self._measure(worker, held, now, seconds)
            worker.tokens += held.size if counts else 0
            del worker.held[order.ticket]
            worker.is_suspect, worker.last_done = False, now
        if counts:
            self._done.add(order.block)
            if order.block in self._wanted:  # it was late, and nobody else has begun it
                self._wanted.remove(order.block)
        return counts

    def failed(self, order: Order) -> None:
        """A block does not come back: it is given again."""
        worker = self._workers.get(order.worker)
        if worker is not None:
            worker.held.pop(order.ticket, None)
        self._want(order)

    def doubt(self, order: Order) -> bool:
        """A result that counted is not to be believed; whether another worker can tell.

        The block is computed anew, then, and not by this worker.
        """
        doubted = self._doubted.setdefault(order.block, set())
        doubted.add(order.worker)
        if not self.is_left_to_others(order.block):
            return False
        self._done.discard(order.block)
        self._want(order)
        return True

    def is_left_to_others(self, block: int) -> bool:
        """Whether a doubted block may still be computed by a worker that is not doubted for it."""
        return bool(set(self.usable) - self._doubted.get(block, set()))

    def settle(self, block: int) -> None:
        """A doubted result has to do after all."""
        self._done.add(block)
        if block in self._wanted:
            self._wanted.remove(block)

    # -- within ----------------------------------------------------------------------------

    def _held(self, order: Order) -> _Held | None:
        worker = self._workers.get(order.worker)
        return None if worker is None else worker.held.get(order.ticket)

    def _want(self, order: Order) -> None:
        """Gives a block out again, unless it is an older step's, done, or with somebody else."""
        if order.step != self._step or order.block in self._done or order.block in self._wanted:
            return
        for worker in self._workers.values():
            if worker.is_suspect or worker.name in self._doubted.get(order.block, ()):
                continue
            orders = (held.order for held in worker.held.values())
            if any(o.block == order.block and o.step == self._step for o in orders):
                return
        self._wanted.append(order.block)
        self._wanted.sort()

    def _give(self, name: str, block: int, now: float) -> Order:
        if block in self._wanted:
            self._wanted.remove(block)
        order = Order(next(self._tickets), self._step, name, block)
        worker = self._workers[name]
        worker.held[order.ticket] = _Held(order, self._sizes[block], now)
        worker.was_idle = False
        return order

    def _choices(self, now: float) -> list[tuple[str, int]]:
        """Pairs of a worker and a block that it is to be given."""
        usable = self.usable
        first = min((i for i in range(len(self._sizes)) if i not in self._done), default=0)
        limit = first + self._window * max(len(usable), 1)
        free = {name: self._slots - len(self._workers[name].held) for name in usable}
        ends = {name: self._end(self._workers[name], now) for name in usable}
        chosen = []
        for block in self._wanted:
            if block >= limit or not any(count > 0 for count in free.values()):
                break
            able = [name for name in usable if name not in self._doubted.get(block, ())]
            if not able:
                continue
            name = self._in_turn(block, able) if self._fixed else self._soonest(block, able, ends)
            ends[name] += self._sizes[block] * self._pace(self._workers[name])
            if free[name] > 0:  # else it waits for this worker, who is done sooner than others
                chosen.append((name, block))
            free[name] -= 1
        return chosen

    def _copies(self, now: float) -> list[tuple[str, int]]:
        """Pairs of a worker that has nothing to do and a block that another may be stuck with.

        That one may just as well be compiling, so that it is not suspect yet.
        """
        if self._wanted:
            return []
        idle = [name for name in self.usable if not self._workers[name].held]
        chosen = []
        for worker in self._workers.values():
            held = next(iter(worker.held.values()), None)
            if held is None or worker.is_suspect or now <= self._due(worker, compiles=False):
                continue
            for each in worker.held.values():
                block = each.order.block
                able = [name for name in idle if name not in self._doubted.get(block, ())]
                if able and self._is_alone_with(each.order):
                    idle.remove(able[0])
                    chosen.append((able[0], block))
        return chosen

    def _is_alone_with(self, order: Order) -> bool:
        """Whether nobody else has a block of this step that has no result yet."""
        if order.step != self._step or order.block in self._done:
            return False
        held = (held.order for worker in self._workers.values() for held in worker.held.values())
        return not any(
            (o.step, o.block) == (order.step, order.block) and o.ticket != order.ticket
            for o in held
        )

    def _in_turn(self, block: int, able: list[str]) -> str:
        count = len(self._turn)
        turns = (self._turn[(block + i) % count] for i in range(count))
        return next((name for name in turns if name in able), able[block % len(able)])

    def _soonest(self, block: int, able: list[str], ends: dict[str, float]) -> str:
        size = self._sizes[block]
        return min(able, key=lambda name: ends[name] + size * self._pace(self._workers[name]))

    def _pace(self, worker: _Worker) -> float:
        """Seconds a token; of one that has done nothing yet, what the others take."""
        if worker.pace is not None:
            return worker.pace
        known = [w.pace for w in self._workers.values() if w.pace is not None]
        return sum(known) / len(known) if known else 1.0

    def _end(self, worker: _Worker, now: float) -> float:
        """When a worker is expected to be done with what it has."""
        end = now
        for index, held in enumerate(worker.held.values()):
            needed = held.size * self._pace(worker)
            end = end + needed if index else max(now, self._start(worker, held) + needed)
        return end

    def _start(self, worker: _Worker, held: _Held) -> float:
        """When a worker has, or should have, begun its first block."""
        begun = held.sent + (worker.writing or 0.0) if held.begun is None else held.begun
        return max(begun, worker.last_done)

    def _due(self, worker: _Worker, *, compiles: bool = True) -> float:
        """When the first block that a worker has is too late.

        Args:
            worker: The worker.
            compiles: Whether what is new to it may take longer.
        """
        held = next(iter(worker.held.values()), None)
        if held is None:
            return float("inf")
        start = max(held.sent if held.begun is None else held.begun, worker.last_done)
        writing = (worker.writing or 0.0) if held.begun is None else 0.0
        if all(w.pace is None for w in self._workers.values()):
            return start + _UNKNOWN
        is_new = held.size not in worker.known or (held.begun is None and worker.writing is None)
        is_new = is_new and compiles
        expected = writing + held.size * self._pace(worker)
        return start + max(_LEAST, _LATE * expected) + (_FIRST if is_new else 0.0)

    def _measure(self, worker: _Worker, held: _Held, now: float, seconds: float) -> None:
        """Notes how long a block took, the way back included and waiting for others not."""
        if held.size in worker.known and held.begun is not None:
            seconds = now - max(held.begun, worker.last_done)
        worker.known.add(held.size)
        pace = max(seconds, 1e-6) / held.size
        if worker.pace is not None:
            pace = min(pace, _MOST * worker.pace)
        worker.pace = _mean(worker.pace, pace)
        worker.seconds += seconds

    def _forgive(self) -> None:
        """One that was too slow to get any work is tried again in the end: it may be free now."""
        paces = [w.pace for w in self._workers.values() if w.pace is not None]
        for worker in self._workers.values():
            if worker.was_idle and worker.pace is not None:
                worker.pace += _FORGIVEN * (min(paces) - worker.pace)
            worker.was_idle = not worker.held


def in_order(name: str) -> tuple[int, int | str]:
    """The order of workers' names: numbers as numbers."""
    return (0, int(name)) if name.isdecimal() else (1, name)


def _mean(known: float | None, new: float) -> float:
    return new if known is None else known + _NEW * (new - known)
