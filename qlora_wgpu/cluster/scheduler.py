"""Which worker computes which block: decisions alone, with no network and no clock of their own.

A block is a micro-batch. A worker that is free takes the next one, and one more that waits there,
so that its link and its device are busy at the same time. What a block gives is the same whoever
computes it: where none is left, whoever is free computes anew what it expects to have done sooner
than those who have it, and the first result counts.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from qlora_wgpu.training.observers import WorkerFigures

_NEW = 0.3  # weight of a new measurement
_MOST = 4.0  # by how much one measurement may be slower than what was known
_LATE = 2.0  # times what is expected, after which a block is late
_LEAST = 2.0  # seconds that a block may always take
_COMPILING = 20.0  # more for what a worker has not computed before
_UNKNOWN = 30.0  # what is expected of the first block of all


def in_order(name: str) -> tuple[int, int | str]:
    """The order of workers' names: numbers as numbers."""
    return (0, int(name)) if name.isdecimal() else (1, name)


@dataclass(frozen=True)
class Assignment:
    """A block that is given to a worker."""

    ticket: int  # a number of its own
    step: int  # the number of the step, of all that were begun
    worker: str  # the worker's name
    block: int  # the block's place in its step
    kind: str  # what is computed of it
    size: int  # its tokens, padding included
    given: float  # when

    @property
    def like(self) -> tuple[str, int]:
        """What blocks have in common for which a worker compiles but once."""
        return self.kind, self.size


@dataclass
class _Worker:
    """A worker, as the scheduler knows it."""

    name: str
    held: dict[int, Assignment] = field(
        default_factory=dict
    )  # not answered, in the order of giving
    paces: dict[str, float] = field(default_factory=dict)  # seconds a token, by kind
    known: set[tuple[str, int]] = field(default_factory=set)  # kinds and sizes that it has computed
    answered: float = 0.0  # when it did last
    is_paused: bool = False
    tokens: int = 0
    timed_tokens: int = 0
    seconds: float = 0.0


@dataclass
class _Step:
    """The blocks of a step, and what has become of them."""

    number: int = 0  # of all steps that were begun
    kind: str = ""  # what is computed of each block
    sizes: Sequence[int] = ()  # tokens of each block, padding included
    turn: Sequence[str] = ()  # the workers that there were when it began
    left: list[int] = field(default_factory=list)  # blocks that nobody computes, in their order
    finished: set[int] = field(default_factory=set)  # blocks that have a result
    # By block, workers that get it again only where there is nobody else
    refused: dict[int, set[str]] = field(default_factory=dict)

    def is_open(self, order: Assignment) -> bool:
        """Whether a result for it would be the first."""
        return order.step == self.number and order.block not in self.finished

    def take(self, block: int) -> None:
        """A block is no longer left."""
        if block in self.left:
            self.left.remove(block)


class Scheduler:
    """Gives a step's blocks to workers.

    With ``fixed``, block b goes to worker b mod n in the order of their names, and to another only
    where that one is gone or silent.
    """

    def __init__(self, *, fixed: bool = False, window: int = 4) -> None:
        """Knows no worker yet; ``window`` times their number of results wait for their turn."""
        self._fixed = fixed
        self._window = window
        self._workers: dict[str, _Worker] = {}  # in the order of their names
        self._paces: dict[str, float] = {}  # seconds a token of all workers, by kind
        self._step = _Step()
        self._tickets = itertools.count(1)

    # -- workers ---------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """A worker has come."""
        names = sorted({*self._workers, name}, key=in_order)
        self._workers = {each: self._workers.get(each) or _Worker(each) for each in names}

    def remove(self, name: str) -> None:
        """A worker is gone, and with it what it was given."""
        if (worker := self._workers.pop(name, None)) is not None:
            self._want(worker.held.values())

    def pause(self, name: str) -> None:
        """A worker gets nothing more until it answers."""
        if name in self._workers:
            self._workers[name].is_paused = True

    def resume(self, name: str) -> None:
        """A worker answers: what it had has come, or will never come."""
        if (worker := self._workers.get(name)) is not None:
            lost, worker.held, worker.is_paused = worker.held, {}, False
            self._want(lost.values())

    def silent(self, now: float) -> list[str]:
        """Workers that are paused, or have not answered for too long."""
        return [worker.name for worker in self._workers.values() if self._is_silent(worker, now)]

    def figures(self, now: float) -> tuple[WorkerFigures, ...]:
        """What each worker has done for gradients since this was asked last, by their names."""
        told = []
        for worker in self._workers.values():
            done = worker.tokens, worker.timed_tokens, worker.seconds
            told.append(WorkerFigures(worker.name, *done, answers=not self._is_silent(worker, now)))
            worker.tokens, worker.timed_tokens, worker.seconds = 0, 0, 0.0
        return tuple(told)

    # -- a step ----------------------------------------------------------------------------

    def begin(self, sizes: Sequence[int], kind: str = "gradient") -> None:
        """A step begins; what is still on its way for an older one does not count any more."""
        left = list(range(len(sizes)))
        self._step = _Step(self._step.number + 1, kind, sizes, list(self._workers), left)

    @property
    def is_complete(self) -> bool:
        """Whether every block has a result."""
        return len(self._step.finished) == len(self._step.sizes)

    def next(self, now: float) -> list[Assignment]:
        """What is to be given to whom at this moment; it counts as given."""
        silent = set(self.silent(now))
        workers = [worker for name, worker in self._workers.items() if name not in silent]
        late = [order for name in silent for order in self._workers[name].held.values()]
        self._want(late, silent)
        free = [worker for worker in workers if not worker.held]
        orders = [order for worker in free for order in self._first_left(worker, silent, now)]
        for worker in workers:
            # The last ones wait nowhere: others will be free before who computes is
            if not self._fixed and len(self._step.left) <= len(self._workers):
                break
            if [order.step for order in worker.held.values()] == [self._step.number]:
                orders += self._first_left(worker, silent, now)
        idle = [worker for worker in workers if not worker.held]
        if idle and not self._fixed:
            orders += self._copies(idle, workers, silent, now)
        return orders

    def done(self, order: Assignment, now: float, seconds: float) -> bool:
        """A block has come back; whether it is this step's and the first result for it.

        ``seconds`` is what the worker says that it computed for.
        """
        counts = self._step.is_open(order)
        worker = self._workers.get(order.worker)
        if worker is not None and worker.held.pop(order.ticket, None) is not None:
            is_known = order.like in worker.known  # else it may have compiled
            if order.kind == "gradient":
                worker.tokens += order.size if counts else 0
                worker.timed_tokens += order.size if is_known else 0
                worker.seconds += seconds if is_known else 0.0
            if is_known:
                for paces in (worker.paces, self._paces):
                    _measure(paces, order, now - max(order.given, worker.answered))
            worker.known.add(order.like)
            worker.answered, worker.is_paused = now, False
        if counts:
            self._step.finished.add(order.block)
            self._step.take(order.block)  # where it was late, it may be that nobody has begun it
        return counts

    def failed(self, order: Assignment) -> None:
        """A block does not come back: it is given again."""
        if order.worker in self._workers:
            self._workers[order.worker].held.pop(order.ticket, None)
        self._want([order])

    def refuse(self, order: Assignment) -> None:
        """A result is not to be believed, or a worker has none: another is to compute the block."""
        self._step.refused.setdefault(order.block, set()).add(order.worker)
        self._step.finished.discard(order.block)
        self._want([order])

    # -- who gets what ---------------------------------------------------------------------

    def _give(self, worker: _Worker, block: int, now: float) -> Assignment:
        step, ticket = self._step, next(self._tickets)
        order = Assignment(
            ticket, step.number, worker.name, block, step.kind, step.sizes[block], now
        )
        worker.held[ticket] = order
        step.take(block)
        return order

    def _want(self, lost: Iterable[Assignment], silent: Collection[str] = ()) -> None:
        """Gives blocks out again, unless they have a result or somebody else has them."""
        step = self._step
        wanted = {each.block for each in lost if step.is_open(each)}.difference(step.left)
        if wanted:
            others = (w for name, w in self._workers.items() if name not in silent)
            held = (order for worker in others for order in worker.held.values())
            wanted -= {order.block for order in held if step.is_open(order)}
            step.left = sorted([*step.left, *wanted])

    def _first_left(
        self, worker: _Worker, silent: Collection[str], now: float
    ) -> Iterator[Assignment]:
        """Gives the first block, if any, that nobody computes and this worker may have."""
        step = self._step
        for block in step.left:
            if self._may_have(worker, block, silent):
                first = next(b for b in itertools.count() if b not in step.finished)
                if block < first + self._window * len(self._workers):
                    yield self._give(worker, block, now)
                break

    def _copies(
        self, idle: list[_Worker], workers: list[_Worker], silent: Collection[str], now: float
    ) -> Iterator[Assignment]:
        """What those compute anew who have nothing to do: what would be done last without them."""
        ends: dict[int, tuple[float, Assignment]] = {}
        for end, order in sorted(self._ends(workers, now), key=lambda each: each[0]):
            ends.setdefault(order.block, (end, order))
        for end, order in reversed(ends.values()):
            able = [each for each in idle if self._may_have(each, order.block, silent)]
            if not able:
                continue
            # One that has computed its like before need not compile
            copier = min(able, key=lambda w: (order.like not in w.known, self._seconds(w, order)))
            if now + self._seconds(copier, order) >= end:
                break
            idle.remove(copier)
            yield self._give(copier, order.block, now)

    def _ends(self, workers: list[_Worker], now: float) -> Iterator[tuple[float, Assignment]]:
        """When blocks are expected to be done that workers have; never, if they are late."""
        for worker in workers:
            end = worker.answered
            for order in worker.held.values():
                begun, takes = max(order.given, end), self._seconds(worker, order)
                end = begun + takes if now < begun + _LATE * takes else math.inf
                if self._step.is_open(order):
                    yield end, order

    def _may_have(self, worker: _Worker, block: int, silent: Collection[str]) -> bool:
        """Whether a worker may compute a block, and it is its turn."""
        refused = self._step.refused.get(block, set())
        able = self._workers.keys() - refused - set(silent) if refused or self._fixed else ()
        if not self._fixed:
            return worker.name not in refused or not able
        turn = self._step.turn
        turns = (turn[(block + i) % len(turn)] for i in range(len(turn)))
        return next((name for name in turns if name in able), worker.name) == worker.name

    def _is_silent(self, worker: _Worker, now: float) -> bool:
        order = next(iter(worker.held.values()), None)
        if worker.is_paused or order is None:
            return worker.is_paused
        allowed = max(_LEAST, _LATE * self._seconds(worker, order))
        allowed += 0.0 if order.like in worker.known else _COMPILING
        return now - max(order.given, worker.answered) > allowed

    def _seconds(self, worker: _Worker, order: Assignment) -> float:
        """What a block is expected to take a worker, by what it or else all took."""
        pace = worker.paces.get(order.kind, self._paces.get(order.kind))
        return _UNKNOWN if pace is None else order.size * pace


def _measure(paces: dict[str, float], order: Assignment, seconds: float) -> None:
    pace = max(seconds, 1e-6) / order.size
    known = paces.setdefault(order.kind, pace)
    paces[order.kind] += _NEW * (min(pace, _MOST * known) - known)
