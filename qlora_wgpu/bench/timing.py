"""Seconds of single dispatches, by the device's own clock where it has one, and of submits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.timestamps import Timestamps, has_timestamps

__all__ = ["CallClock", "DispatchTimer", "Spread", "best_of", "clock_of", "clocked",
           "clocked_submits", "has_timestamps"]  # fmt: skip


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
    """Times dispatches, each in a submit that is waited for."""

    def __init__(self, device: Device) -> None:
        """Makes the queries; the device must have timestamps (``has_timestamps``)."""
        self._timestamps = Timestamps(device, 1)

    def seconds(self, dispatch: Dispatch) -> float:
        """Runs a dispatch alone and returns how long the device worked on it."""
        return self._timestamps.seconds([dispatch])[0]


def clock_of(device: Device, waits_for: Any) -> Callable[[Dispatch], float]:
    """The best clock there is: timestamps, or else the host's, which counts submit and wait.

    Args:
        device: The device that runs the dispatches.
        waits_for: A buffer of which four bytes are read back to wait for the dispatch.
    """
    if has_timestamps(device):
        return DispatchTimer(device).seconds

    def by_host(dispatch: Dispatch) -> float:
        device.read(waits_for, 4)
        begin = time.perf_counter()
        device.dispatch(*dispatch)
        device.read(waits_for, 4)
        return time.perf_counter() - begin

    return by_host


def best_of(
    launches: Sequence[Sequence[Dispatch]], timer: DispatchTimer, rounds: int
) -> list[float]:
    """The least seconds of each launch over so many rounds, all in their order every time.

    Args:
        launches: The dispatches of each, timed one by one (``Program.pieces``), so that none takes
            longer than the driver allows.
        timer: What times a dispatch.
        rounds: How often each is timed.
    """
    best = [float("inf")] * len(launches)
    for _ in range(rounds):
        for index, dispatches in enumerate(launches):
            best[index] = min(best[index], sum(map(timer.seconds, dispatches)))
    return best


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
