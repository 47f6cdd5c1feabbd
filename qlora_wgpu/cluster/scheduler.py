"""Assigns a step's blocks to workers: only decisions, without network and clock.

A block is a micro-batch, and its result does not depend on the worker that computes it. Workers
pull: a worker takes the next block if it can finish it by the time at which all workers together
could finish the rest, and gets a second one when the first is half done, so that its link and its
device are busy at the same time. An idle worker computes a copy of a block where it expects to be
done well before the worker that has it; the first result counts.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from qlora_wgpu.training.observers import WorkerMetrics

_NEW = 0.3  # weight of a new measurement
_MAX_SLOWDOWN = 4.0  # at most how many times the average one measurement counts
_LATE = 2.0  # a block is late after this many times its expected seconds
_MIN_TIMEOUT = 2.0  # seconds that any block may take
_COMPILING = 20.0  # additional seconds for a kind and size that a worker has not computed before
_UNKNOWN = 30.0  # expected seconds of a block while nothing has been measured
_PREFETCH = 0.5  # a worker gets its next block when this share of the current one remains,
_PREFETCH_SECONDS = 0.5  # or this many seconds: more than what passes between two calls of next
_COPY_GAIN = 1.5  # a copy must be expected in less than 1 / 1.5 of the time that remains otherwise
_RECOVERY = 0.1  # of the gap to the fastest worker, for each step in which a worker had no block


def name_order(name: str) -> tuple[int, int | str]:
    """Sort key of workers' names: numbers are compared as numbers."""
    return (0, int(name)) if name.isdecimal() else (1, name)


@dataclass(frozen=True)
class Assignment:
    """A block that is assigned to a worker."""

    ticket: int  # unique
    step: int  # number of the step since the start
    worker: str  # the worker's name
    block: int  # index in the step
    kind: str  # what is computed, such as "gradient"
    size: int  # tokens, padding included
    sent: float  # time of the assignment

    @property
    def program(self) -> tuple[str, int]:
        """What a worker compiles once."""
        return self.kind, self.size


@dataclass
class _Worker:
    name: str
    # Assignments without a result, by ticket, oldest first
    held: dict[int, Assignment] = field(default_factory=dict)
    paces: dict[str, float] = field(default_factory=dict)  # seconds per token, by kind
    compiled: set[tuple[str, int]] = field(default_factory=set)
    last_result: float = 0.0  # time
    last_step: int = 0  # the last step in which it had a block
    is_paused: bool = False
    tokens: int = 0
    timed_tokens: int = 0
    seconds: float = 0.0


@dataclass
class _Step:
    number: int = 0  # since the start
    kind: str = ""  # what is computed
    sizes: Sequence[int] = ()  # tokens of each block, padding included
    workers: Sequence[str] = ()  # names at its start, sorted
    pending: list[int] = field(default_factory=list)  # blocks that no worker has, sorted
    finished: set[int] = field(default_factory=set)  # blocks with a result
    # By block, workers whose result was rejected; they get it again only if no other can
    rejected: dict[int, set[str]] = field(default_factory=dict)

    def is_open(self, order: Assignment) -> bool:
        """Whether the block still needs a result."""
        return order.step == self.number and order.block not in self.finished

    def take(self, block: int) -> None:
        """Removes a block from those that no worker has."""
        if block in self.pending:
            self.pending.remove(block)


class Scheduler:
    """Assigns a step's blocks to workers.

    With ``fixed``, block b goes to worker b mod n in the order of their names, and to another only
    if that one is gone or silent. Results are summed in the order of the blocks: at most ``window``
    per worker are buffered.
    """

    def __init__(self, *, fixed: bool = False, window: int = 4) -> None:
        self._fixed = fixed
        self._window = window
        self._workers: dict[str, _Worker] = {}  # sorted by name
        self._paces: dict[str, float] = {}  # seconds per token on average, by kind
        self._step = _Step()
        self._tickets = itertools.count(1)

    # -- workers ---------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """Adds a worker."""
        names = sorted({*self._workers, name}, key=name_order)
        self._workers = {each: self._workers.get(each) or _Worker(each) for each in names}

    def remove(self, name: str) -> None:
        """Removes a worker; its blocks are pending again."""
        if (worker := self._workers.pop(name, None)) is not None:
            self._release(worker.held.values())

    def pause(self, name: str) -> None:
        """Assigns nothing to a worker until it responds."""
        if name in self._workers:
            self._workers[name].is_paused = True

    def resume(self, name: str) -> None:
        """A worker responds again; blocks without a result so far are lost."""
        if (worker := self._workers.get(name)) is not None:
            lost, worker.held, worker.is_paused = worker.held, {}, False
            self._release(lost.values())

    def silent(self, now: float) -> list[str]:
        """Names of workers that are paused or have a block that timed out."""
        return [worker.name for worker in self._workers.values() if self._is_silent(worker, now)]

    def worker_metrics(self, now: float) -> tuple[WorkerMetrics, ...]:
        """What each worker has done for gradients since the last call, sorted by name."""
        metrics = []
        for worker in self._workers.values():
            done = worker.tokens, worker.timed_tokens, worker.seconds
            answers = not self._is_silent(worker, now)
            metrics.append(WorkerMetrics(worker.name, *done, answers=answers))
            worker.tokens, worker.timed_tokens, worker.seconds = 0, 0, 0.0
        return tuple(metrics)

    # -- a step ----------------------------------------------------------------------------

    def begin(self, sizes: Sequence[int], kind: str = "gradient") -> None:
        """Starts a step; results of older ones are ignored from now on."""
        self._recover()
        pending = list(range(len(sizes)))
        self._step = _Step(self._step.number + 1, kind, sizes, list(self._workers), pending)

    @property
    def is_complete(self) -> bool:
        """Whether every block has a result."""
        return len(self._step.finished) == len(self._step.sizes)

    def next(self, now: float) -> list[Assignment]:
        """Assigns blocks to workers."""
        silent = set(self.silent(now))
        workers = [worker for name, worker in self._workers.items() if name not in silent]
        late = [order for name in silent for order in self._workers[name].held.values()]
        self._release(late, silent)
        orders = self._assign_next(workers, 0, silent, now)
        orders += self._assign_next(workers, 1, silent, now)
        idle = [worker for worker in workers if not worker.held]
        if idle and not self._fixed:
            orders += self._copies(idle, workers, silent, now)
        return orders

    def done(self, order: Assignment, now: float, seconds: float) -> bool:
        """Records a result; returns whether it is the first for a block of this step.

        ``seconds`` is the worker's own measurement.
        """
        counts = self._step.is_open(order)
        worker = self._workers.get(order.worker)
        if worker is not None and worker.held.pop(order.ticket, None) is not None:
            is_compiled = order.program in worker.compiled  # else the time may include compiling
            if order.kind == "gradient":
                worker.tokens += order.size if counts else 0
                worker.timed_tokens += order.size if is_compiled else 0
                worker.seconds += seconds if is_compiled else 0.0
            if is_compiled:
                for paces in (worker.paces, self._paces):
                    _measure(paces, order, now - max(order.sent, worker.last_result))
            worker.compiled.add(order.program)
            worker.last_result, worker.is_paused = now, False
        if counts:
            self._step.finished.add(order.block)
            self._step.take(order.block)  # it may be pending again, if this result is late
        return counts

    def failed(self, order: Assignment) -> None:
        """An assignment has failed: its block is pending again."""
        if order.worker in self._workers:
            self._workers[order.worker].held.pop(order.ticket, None)
        self._release([order])

    def reject(self, order: Assignment) -> None:
        """Rejects a worker's result, or lack of one: another worker must compute the block."""
        self._step.rejected.setdefault(order.block, set()).add(order.worker)
        self._step.finished.discard(order.block)
        self._release([order])

    # -- choosing workers ------------------------------------------------------------------

    def _assign(self, worker: _Worker, block: int, now: float) -> Assignment:
        step, ticket = self._step, next(self._tickets)
        order = Assignment(
            ticket, step.number, worker.name, block, step.kind, step.sizes[block], now
        )
        worker.held[ticket], worker.last_step = order, step.number
        step.take(block)
        return order

    def _release(self, lost: Iterable[Assignment], silent: Collection[str] = ()) -> None:
        """Makes blocks pending that have no result, and that no other worker has."""
        step = self._step
        lost_blocks = {each.block for each in lost if step.is_open(each)}.difference(step.pending)
        if lost_blocks:
            others = (w for name, w in self._workers.items() if name not in silent)
            held = (order for worker in others for order in worker.held.values())
            lost_blocks -= {order.block for order in held if step.is_open(order)}
            step.pending = sorted([*step.pending, *lost_blocks])

    def _assign_next(
        self, workers: list[_Worker], held: int, silent: Collection[str], now: float
    ) -> list[Assignment]:
        """Assigns a block to each worker that has ``held`` blocks and is needed for another."""
        if not self._step.pending:
            return []
        delays = {
            worker.name: max([0.0, *(end - now for end, _ in self._schedule(worker, now))])
            for worker in workers
        }
        sizes = [self._step.sizes[block] for block in self._step.pending]
        size = sum(sizes) / len(sizes)
        takes = {worker.name: self._seconds(worker, self._step.kind, size) for worker in workers}
        makespan = self._makespan(list(delays.values()), list(takes.values()), len(sizes))
        orders: list[Assignment] = []
        for worker in sorted(workers, key=lambda w: delays[w.name] + takes[w.name]):
            if len(worker.held) != held:
                continue
            remaining, seconds = delays[worker.name], takes[worker.name]
            # A rejected block may be left to a worker that is slower than the others
            if not (self._fixed or self._step.rejected):
                if remaining + seconds > makespan:
                    break
                # The last blocks stay pending, since another worker may be free sooner
                if held and len(self._step.pending) <= len(self._workers):
                    break
                if held and remaining > max(_PREFETCH * seconds, _PREFETCH_SECONDS):
                    continue
            first = next(b for b in itertools.count() if b not in self._step.finished)
            window = first + self._window * len(self._workers)
            able = (b for b in self._step.pending if self._may_compute(worker, b, silent))
            if (block := next(able, window)) < window:
                orders.append(self._assign(worker, block, now))
        return orders

    def _makespan(self, delays: list[float], takes: list[float], count: int) -> float:
        """The fewest seconds in which workers can compute ``count`` blocks, at most a window's.

        ``delays`` are the seconds until each worker is free. A worker that takes longer for one
        block would stall the others. Rounded up, so that the first to finish a block takes one.
        """
        count = min(count, self._window * len(self._workers))
        free, seconds = np.array(delays), np.array(takes)
        if not np.isfinite(free).any():
            return math.inf
        low, high = 0.0, float((free + count * seconds).min())
        for _ in range(30):
            middle = (low + high) / 2
            if np.floor((middle - free) / seconds).clip(min=0).sum() >= count:
                high = middle
            else:
                low = middle
        return high * (1 + 1e-6)

    def _copies(
        self, idle: list[_Worker], workers: list[_Worker], silent: Collection[str], now: float
    ) -> Iterator[Assignment]:
        """Assigns idle workers copies of the blocks whose results are expected last."""
        ends: dict[int, tuple[float, Assignment]] = {}
        expected = [each for worker in workers for each in self._schedule(worker, now)]
        for end, order in sorted(expected, key=lambda each: each[0]):
            if self._step.is_open(order):
                ends.setdefault(order.block, (end, order))
        for end, order in reversed(ends.values()):
            able = [each for each in idle if self._may_compute(each, order.block, silent)]
            if not able:
                continue
            # Rather a worker that does not have to compile
            copier = min(
                able, key=lambda w: (order.program not in w.compiled, self._takes(w, order))
            )
            if now + _COPY_GAIN * self._takes(copier, order) >= end:
                break
            idle.remove(copier)
            yield self._assign(copier, order.block, now)

    def _schedule(self, worker: _Worker, now: float) -> Iterator[tuple[float, Assignment]]:
        """When a worker's blocks are expected; never, if the first is late."""
        end = worker.last_result
        for order in worker.held.values():
            begin, takes = max(order.sent, end), self._takes(worker, order)
            end = begin + takes if now < begin + _LATE * takes else math.inf
            yield end, order

    def _may_compute(self, worker: _Worker, block: int, silent: Collection[str]) -> bool:
        """Whether a worker may compute a block, and with ``fixed``, whether it is its turn."""
        rejected = self._step.rejected.get(block, set())
        able = self._workers.keys() - rejected - set(silent) if rejected or self._fixed else ()
        if not self._fixed:
            return worker.name not in rejected or not able
        names = self._step.workers
        turns = (names[(block + i) % len(names)] for i in range(len(names)))
        return next((name for name in turns if name in able), worker.name) == worker.name

    def _is_silent(self, worker: _Worker, now: float) -> bool:
        order = next(iter(worker.held.values()), None)
        if worker.is_paused or order is None:
            return worker.is_paused
        allowed = max(_MIN_TIMEOUT, _LATE * self._takes(worker, order))
        allowed += 0.0 if order.program in worker.compiled else _COMPILING
        return now - max(order.sent, worker.last_result) > allowed

    def _takes(self, worker: _Worker, order: Assignment) -> float:
        return self._seconds(worker, order.kind, order.size)

    def _seconds(self, worker: _Worker, kind: str, size: float) -> float:
        """How long a block is expected to take a worker; by all workers' average if it is new."""
        pace = worker.paces.get(kind, self._paces.get(kind))
        return _UNKNOWN if pace is None else size * pace

    def _recover(self) -> None:
        """Assumes that workers too slow for any block of the last step have become faster."""
        step = self._step
        fastest = min((w.paces.get(step.kind, math.inf) for w in self._workers.values()), default=0)
        for worker in self._workers.values():
            if step.kind in worker.paces and not worker.held and worker.last_step < step.number:
                worker.paces[step.kind] += _RECOVERY * (fastest - worker.paces[step.kind])


def _measure(paces: dict[str, float], order: Assignment, seconds: float) -> None:
    pace = max(seconds, 1e-6) / order.size
    average = paces.setdefault(order.kind, pace)
    paces[order.kind] += _NEW * (min(pace, _MAX_SLOWDOWN * average) - average)
