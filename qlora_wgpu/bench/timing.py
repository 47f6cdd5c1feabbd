"""Seconds of single dispatches, by the device's own clock where it has one, and of submits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device


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
    """Times dispatches with two timestamp queries, each in a submit that is waited for."""

    def __init__(self, device: Device) -> None:
        """Makes the queries; the device must have timestamps (``has_timestamps``)."""
        usage = device.backend.module.BufferUsage
        self._raw = device.raw
        self._queries = self._raw.create_query_set(type="timestamp", count=2)
        self._resolved = self._raw.create_buffer(
            size=256, usage=usage.QUERY_RESOLVE | usage.COPY_SRC
        )
        self._tick = 1e-9 * device.backend.timestamp_period(self._raw)

    def seconds(self, dispatch: Dispatch) -> float:
        """Runs a dispatch alone and returns how long the device worked on it."""
        pipeline, group, workgroups = dispatch
        encoder = self._raw.create_command_encoder()
        compute = encoder.begin_compute_pass(
            timestamp_writes={
                "query_set": self._queries,
                "beginning_of_pass_write_index": 0,
                "end_of_pass_write_index": 1,
            }
        )
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(*workgroups)
        compute.end()
        encoder.resolve_query_set(self._queries, 0, 2, self._resolved, 0)
        self._raw.queue.submit([encoder.finish()])
        begin, end = np.frombuffer(self._raw.queue.read_buffer(self._resolved, 0, 16), np.uint64)
        # Clocks of some drivers step back a little between two readings.
        return max(0.0, (float(end) - float(begin)) * self._tick)


def has_timestamps(device: Device) -> bool:
    """Whether the GPU can tell when a kernel began and ended."""
    return "timestamp-query" in device.features


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


def best_of(dispatches: Sequence[Dispatch], timer: DispatchTimer, rounds: int) -> list[float]:
    """The least seconds of each dispatch over so many rounds, all in their order every time."""
    best = [float("inf")] * len(dispatches)
    for _ in range(rounds):
        for index, dispatch in enumerate(dispatches):
            best[index] = min(best[index], timer.seconds(dispatch))
    return best


class SubmitClock:
    """Seconds spent inside submits, where a software GPU computes."""

    def __init__(self) -> None:
        """Starts at zero."""
        self.seconds = 0.0


@contextmanager
def clocked_submits(device: Device) -> Iterator[SubmitClock]:
    """Counts a device's submits into a clock while the context lasts."""
    queue, clock = device.raw.queue, SubmitClock()
    original = queue.submit

    def submit(buffers: Any) -> None:
        begin = time.perf_counter()
        original(buffers)
        clock.seconds += time.perf_counter() - begin

    queue.submit = submit
    try:
        yield clock
    finally:
        del queue.submit  # the class's own is found again
