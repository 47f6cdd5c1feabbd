"""Splitting a program into submits, by the number and the time of launches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.timing import Timestamps, has_timestamps
from qlora_wgpu.gpu.wgsl import Workgroups

Box = tuple[Workgroups, Workgroups]  # its first workgroup, and its size along x, y, z

_TOLERATED = 1.5  # times the limit, above which a single launch is split
_MOST_TIMED = 1000  # maximum dispatches per submit, by the number of timestamps
_CREDIBLE = 1.5  # maximum sum of the device's timestamps, in units of the host's measurement


@dataclass(frozen=True)
class TimedDispatch:
    """A launch, or a part of its grid, with its inputs for the cost model."""

    index: int  # the launch's place in its plan
    dispatch: Dispatch
    path: str  # the shader's file
    flops: int
    nbytes: int
    seconds: float  # the estimated time


class ProfiledSubmission:
    """Runs dispatches in submits, waits for each, and updates the cost model."""

    def __init__(self, device: Device, record: Callable[[list[Dispatch]], Any], launches: int):
        self.took = [0.0] * launches  # seconds per launch so far
        self._device, self._record = device, record
        self._most = min(device.dispatches_per_submit, _MOST_TIMED)
        self._clock = Timestamps(device, self._most) if has_timestamps(device) else None
        self._waiting: list[TimedDispatch] = []
        self._awaited = device.buffer(16, "uniforms", "a word to wait for")
        self._wait()  # for uploads, which must not count for any launch

    def add(self, timed: TimedDispatch) -> None:
        """Queues a dispatch; runs those queued before if there would be too many."""
        planned = sum(map(self._planned, [*self._waiting, timed]))
        full = planned > self._device.pace.limit or len(self._waiting) == self._most
        if self._waiting and full:
            self.run()
        self._waiting.append(timed)

    def run(self) -> None:
        queued, self._waiting = self._waiting, []
        for timed, seconds in zip(queued, self._seconds(queued), strict=True):
            self.took[timed.index] += seconds
            self._device.pace.learn(timed.path, timed.flops, timed.nbytes, seconds)

    def _seconds(self, queued: list[TimedDispatch]) -> list[float]:
        dispatches = [timed.dispatch for timed in queued]
        begin = time.perf_counter()
        seen = []
        if self._clock is not None:
            seen = self._clock.seconds(dispatches)
        else:
            self._device.submit(self._record(dispatches))
            self._wait()
        whole = time.perf_counter() - begin
        if 0.0 < sum(seen) < _CREDIBLE * whole:
            return seen
        planned = [self._planned(timed) for timed in queued]
        return [whole * each / sum(planned) for each in planned]

    def _planned(self, timed: TimedDispatch) -> float:
        return self._device.pace.seconds(timed.path, timed.flops, timed.nbytes)

    def _wait(self) -> None:
        self._device.read(self._awaited, 4)


def encode(device: Device, dispatches: Sequence[Dispatch]) -> Any:
    with device.driver_call("recording work"):
        encoder = device.raw.create_command_encoder()
        compute = encoder.begin_compute_pass()
        device.backend.record(compute, dispatches)
        compute.end()
        return encoder.finish()


def doubling_chunks(dispatches: Sequence[Dispatch], first: int) -> Iterator[Sequence[Dispatch]]:
    """Yields consecutive chunks: ``first`` dispatches, then twice as many each time."""
    begin = 0
    while begin < len(dispatches):
        yield dispatches[begin : begin + first]
        begin, first = begin + first, 2 * first


def cut(seconds: Sequence[float], limit: float, most: int) -> Iterator[slice]:
    """Yields consecutive slices that fill a submit each."""
    begin, total = 0, 0.0
    for index, took in enumerate(seconds):
        if index > begin and (total + took > limit or index - begin == most):
            yield slice(begin, index)
            begin, total = index, 0.0
        total += took
    if begin < len(seconds):
        yield slice(begin, len(seconds))


def parts_needed(seconds: float, limit: float) -> int:
    return math.ceil(seconds / limit) if seconds > _TOLERATED * limit else 1


def split_grid(grid: Workgroups, count: int) -> list[Box]:
    """Splits a grid into at least ``count`` boxes, if it has that many workgroups.

    Outer dimensions first, which are samples, heads or rows: their parts take equal time, unlike
    the queries of one head under a causal mask.
    """
    found: list[Box] = [((0, 0, 0), grid)]
    for axis in (2, 1, 0):
        each = math.ceil(count / len(found))
        found = [part for box in found for part in _along(box, axis, each)]
    return found


def _along(box: Box, axis: int, count: int) -> Iterator[Box]:
    first, size = box
    count = min(count, size[axis])
    for index in range(count):
        begin, end = (size[axis] * i // count for i in (index, index + 1))
        yield _replaced(first, axis, first[axis] + begin), _replaced(size, axis, end - begin)


def _replaced(values: Workgroups, axis: int, value: int) -> Workgroups:
    x, y, z = (value if i == axis else old for i, old in enumerate(values))
    return x, y, z
