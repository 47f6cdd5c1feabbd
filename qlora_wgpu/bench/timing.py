"""Seconds of single dispatches, by the device's own clock where it has one, and of submits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from qlora_wgpu.bench.load import Load
from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.timestamps import Timestamps, has_timestamps
from qlora_wgpu.graph.submits import cut

__all__ = ["CallClock", "DispatchTimer", "Spread", "best_of", "clock_of", "clocked",
           "clocked_submits", "has_timestamps"]  # fmt: skip

_MOST_TIMED = 500  # dispatches of a submit: there are only so many timestamps


@dataclass(frozen=True)
class Spread:
    """Median and extremes of repeated measurements of one quantity."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sums up at least one value."""
        return cls(float(np.median(values)), float(min(values)), float(max(values)))


class DispatchTimer:
    """Times dispatches on a GPU whose clock is kept up.

    Attributes:
        load: What keeps it up.
    """

    def __init__(self, device: Device) -> None:
        """Makes the queries; the device must have timestamps (``has_timestamps``)."""
        self.load = Load(device)
        self._limit = device.pace.limit
        self._timestamps = Timestamps(device, _MOST_TIMED)

    def rough_seconds(self, dispatch: Dispatch) -> float:
        """Runs a dispatch alone, at whatever clock the GPU has now."""
        return self._timestamps.seconds([dispatch])[0]

    def seconds(self, dispatches: Sequence[Dispatch], expected: Sequence[float]) -> list[float]:
        """Runs dispatches, in as few submits as their time allows, each right after busy work.

        Args:
            dispatches: What runs.
            expected: About how long each takes.

        Returns:
            How long the device worked on each.
        """
        seconds: list[float] = []
        for each in cut(expected, self._limit, _MOST_TIMED):
            seconds += self._timestamps.seconds(dispatches[each], self.load.run)
        return seconds


def clock_of(device: Device, waits_for: Any) -> Callable[[Dispatch], float]:
    """The best clock there is: timestamps, or else the host's, which counts submit and wait.

    Args:
        device: The device that runs the dispatches; its clock is raised first, and kept up.
        waits_for: A buffer of which four bytes are read back to wait for the dispatch.
    """
    if has_timestamps(device):
        timer = DispatchTimer(device)
        timer.load.raise_clock()
        return lambda dispatch: timer.seconds([dispatch], [0.0])[0]
    load = Load(device)
    load.raise_clock()

    def by_host(dispatch: Dispatch) -> float:
        device.read(waits_for, 4)
        load.run()
        begin = time.perf_counter()
        device.dispatch(*dispatch)
        device.read(waits_for, 4)
        return time.perf_counter() - begin

    return by_host


def best_of(
    launches: Sequence[Sequence[Dispatch]],
    timer: DispatchTimer,
    rounds: int,
    *,
    least: int | None = None,
    enough: float = math.inf,
) -> list[float]:
    """The least seconds of each launch over some rounds, all in their order every time.

    The first round is one by one, since nobody knows how long each takes; the GPU's clock is raised
    after it.

    Args:
        launches: The dispatches of each (``Program.pieces``), so that none takes longer than the
            driver allows.
        timer: What times them.
        rounds: How often each is timed, at most.
        least: How often at least; as often as at most by default.
        enough: Seconds of the GPU's work after which there is no further round.
    """
    pieces = [dispatch for dispatches in launches for dispatch in dispatches]
    best = [timer.rough_seconds(piece) for piece in pieces]
    timer.load.raise_clock()
    spent = 0.0
    for done in range(1, rounds):
        if done >= (least or rounds) and spent + sum(best) > enough:
            break
        seconds = timer.seconds(pieces, best)
        spent += sum(seconds)
        best = list(map(min, best, seconds))
    each = iter(best)
    return [sum(islice(each, len(dispatches))) for dispatches in launches]


class CallClock:
    """Seconds spent inside calls of one method."""

    def __init__(self) -> None:
        """Starts at zero."""
        self.seconds = 0.0


@contextmanager
def clocked(owner: Any, method: str) -> Iterator[CallClock]:
    """Counts the calls of an object's method into a clock while the context lasts."""
    clock, original = CallClock(), getattr(owner, method)

    def call(*arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return original(*arguments)
        finally:
            clock.seconds += time.perf_counter() - begin

    setattr(owner, method, call)
    try:
        yield clock
    finally:
        delattr(owner, method)  # the class's own is found again


def clocked_submits(device: Device) -> AbstractContextManager[CallClock]:
    """Counts a device's submits, where a software GPU computes."""
    return clocked(device.raw.queue, "submit")
