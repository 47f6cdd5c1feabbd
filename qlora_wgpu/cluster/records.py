"""What a division knows of a worker: what it holds, and how fast it was so far."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from qlora_wgpu.cluster.orders import Order, Work

_NEW = 0.3  # weight of a new measurement
_MOST = 4.0  # by how much one measurement may be slower than what was known


@dataclass
class Held:
    """A block that a worker has been given and has not answered.

    Attributes:
        order: As it was given.
        kind: What is computed of it.
        size: Its tokens, padding included.
        sent: When it was given.
        begun: When the worker had the parameters that it needs; None before that.
    """

    order: Order
    kind: str
    size: int
    sent: float
    begun: float | None = None


@dataclass
class Speed:
    """How fast a worker computes one kind of block.

    Attributes:
        pace: Seconds a token; None until a size was computed a second time.
        first: The fewest seconds a token of blocks whose size was new, compiling included.
        known: Sizes that it has computed.
    """

    pace: float | None = None
    first: float | None = None
    known: set[int] = field(default_factory=set)

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
    """A worker, as a division knows it.

    Attributes:
        name: The worker's.
        speeds: By the kind of block.
        writing: Seconds until it has the parameters; None where that is not known.
        last_done: When it answered last.
        is_suspect: Whether it has not answered for too long.
        held: What it has been given, by ticket, in the order of giving.
        was_idle: Whether it got nothing in the present step.
    """

    name: str
    speeds: defaultdict[str, Speed] = field(default_factory=lambda: defaultdict(Speed))
    writing: float | None = None
    last_done: float = 0.0
    is_suspect: bool = False
    held: dict[int, Held] = field(default_factory=dict)
    was_idle: bool = True
    _tokens: int = 0
    _timed_tokens: int = 0
    _seconds: float = 0.0

    def begun(self, held: Held, now: float) -> None:
        """The worker has all that a block needs."""
        self.writing = _mean(self.writing, now - held.sent)
        held.begun = now

    def done(self, held: Held, now: float, seconds: float, *, counts: bool, timed: bool) -> None:
        """A block has come back.

        Args:
            held: The block.
            now: The time.
            seconds: What the worker says that it has computed for.
            counts: Whether its result is the first one.
            timed: Whether its time belongs to what is told of the worker.
        """
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
