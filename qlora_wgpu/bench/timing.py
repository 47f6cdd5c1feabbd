"""Times of dispatches, submits and training steps, on a GPU that is kept busy.

An idle GPU lowers its clock, some to a fifth, and raises it only after a while of continuous work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from qlora_wgpu.errors import TrainingError
from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.timing import Timestamps, has_timestamps
from qlora_wgpu.gpu.wgsl import load_shader
from qlora_wgpu.graph.submission import cut
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.ops.optimizers import STATS_LOSS
from qlora_wgpu.training.optimizer import Optimizer

__all__ = [
    "CallClock",
    "DispatchTimer",
    "Spread",
    "best_of",
    "clock_of",
    "clocked",
    "clocked_submits",
    "has_timestamps",
]

_GROUPS, _GROUP = 4096, 32  # enough to fill every GPU
_QUEUED = 4  # submits between two waits
_SECONDS = 0.005  # target duration of each
_FIRST_TURNS, _MAX_TURNS = 4, 32_768
_RISES, _NEAR = 1.02, 0.95  # smaller differences are noise
_SETTLED, _MAX_SECONDS = 1.0, 2.0  # without a rise, which some drivers delay, and in total


class Load:
    """Multiply-adds that keep a GPU busy; nothing for a software GPU, whose clock is the host's."""

    def __init__(self, device: Device) -> None:
        """Prepares the work; its memory is not counted."""
        self._device = device
        self._turns = _FIRST_TURNS
        if device.is_cpu:
            return
        self._shader = load_shader("bench/fma.wgsl")
        usage = device.backend.module.BufferUsage
        flags = usage.STORAGE | usage.COPY_DST | usage.COPY_SRC | usage.UNIFORM
        nbytes = 4 * _GROUPS * _GROUP
        with device.driver_call("allocating buffers for warm-up work"):
            self._sums = device.raw.create_buffer(size=nbytes, usage=flags)
            self._params = device.raw.create_buffer(size=16, usage=flags)
        windows = {"params": (self._params, 0, 16), "sums": (self._sums, 0, nbytes)}
        group = device.bind_group(self._shader, windows)
        self._dispatch = device.pipeline(self._shader), group, (_GROUPS, 1, 1)

    def raise_clock(self) -> None:
        """Keeps the GPU busy until it is as fast as before, or no longer gets faster."""
        if self._device.is_cpu:
            return
        known, fastest = self._device.pace.busy_rate, 0.0
        begin = now = rose = time.perf_counter()
        while now - rose < _SETTLED and now - begin < _MAX_SECONDS:
            rate = self.run()
            now = time.perf_counter()
            if known and rate > _NEAR * known:
                return
            if rate > _RISES * fastest:
                fastest, rose = rate, now

    def clock(self) -> float:
        """The current speed as a fraction of the highest so far; 1 for a software GPU."""
        return self.run() / self._device.pace.busy_rate if self._device.pace.busy_rate else 1.0

    def run(self) -> float:
        """Keeps the GPU busy for a moment, and waits; returns its speed."""
        device = self._device
        if device.is_cpu:
            return 0.0
        values = {"turns": self._turns, "factor": 0.5, "summand": 1.0}
        device.write(self._params, self._shader.pack_params(values))
        device.read(self._sums, 4)  # waits for earlier submits
        begin = time.perf_counter()
        for _ in range(_QUEUED):
            device.dispatch(*self._dispatch)
        device.read(self._sums, 4)
        seconds = time.perf_counter() - begin
        rate = _QUEUED * self._turns / seconds
        # If the clock falls again, a submit must not become too long for the driver.
        aim = min(_SECONDS, device.pace.limit / 10) * rate
        self._turns = max(1, min(int(aim), 4 * self._turns, _MAX_TURNS))
        device.pace.busy_rate = max(device.pace.busy_rate, rate)
        return rate


_MAX_TIMED = 500  # dispatches of a submit, by the number of timestamps


@dataclass(frozen=True)
class Spread:
    """Median and extremes of repeated measurements of one quantity."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one or more values."""
        return cls(float(np.median(values)), float(min(values)), float(max(values)))


class DispatchTimer:
    """Times dispatches on a GPU that ``load`` keeps busy."""

    def __init__(self, device: Device) -> None:
        """Creates the queries; the device must have timestamps (``has_timestamps``)."""
        self.load = Load(device)
        self._limit = device.pace.limit
        self._timestamps = Timestamps(device, _MAX_TIMED)

    def rough_seconds(self, dispatch: Dispatch) -> float:
        """Runs a dispatch alone, without raising the clock."""
        return self._timestamps.seconds([dispatch])[0]

    def seconds(self, dispatches: Sequence[Dispatch], expected: Sequence[float]) -> list[float]:
        """Runs dispatches in as few submits as their time allows, each right after ``load``."""
        seconds: list[float] = []
        for each in cut(expected, self._limit, _MAX_TIMED):
            seconds += self._timestamps.seconds(dispatches[each], self.load.run)
        return seconds


def clock_of(device: Device, waits_for: Any) -> Callable[[Dispatch], float]:
    """The best available timer: timestamps, or the host's clock, which includes submit and wait.

    The GPU is kept busy. To wait, four bytes of a buffer are read back.
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
    """The minimum time of each launch over several rounds, each of which runs all in order.

    The first round runs them one by one, since their durations are unknown; then the clock is
    raised.
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
        self.seconds = 0.0


@contextmanager
def clocked(owner: Any, method: str) -> Iterator[CallClock]:
    """Times the calls of an object's method within the context."""
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
        delattr(owner, method)  # restores the class's method


def clocked_submits(device: Device) -> AbstractContextManager[CallClock]:
    """Times a device's submits, in which a software GPU computes."""
    return clocked(device.raw.queue, "submit")


_WARM_UP = 2  # steps that are not counted


@dataclass(frozen=True)
class StepTimes:
    """Times of steps of one micro-batch and one update."""

    first_step_seconds: float  # after compilation
    step_seconds: Spread  # without warm-up steps
    # Median fraction of packing and encoding in a step; without submits, in which a software GPU
    # computes
    host_share: float
    loss: float  # mean loss of the last step


def time_steps(
    model: QLoRAModel,
    optimizer: Optimizer,
    batch: int,
    seq: int,
    steps: int,
    progress: Callable[[], None] = lambda: None,
) -> StepTimes:
    """Trains on random tokens, and waits for every step."""
    ids = np.random.default_rng(1).integers(0, model.architecture.text_vocab_size, (batch, seq))
    checked, load = model.checked(ids, ids), Load(model.device)
    model.zero_gradient()
    model.read_stats()
    whole: list[float] = []
    host: list[float] = []
    with clocked_submits(model.device) as submits:
        for step in range(1, total_steps(steps) + 1):
            if step == 1 + _WARM_UP:
                load.raise_clock()
            submits.seconds = 0.0
            begin = time.perf_counter()
            model.accumulate(*checked)
            optimizer.step(step)
            encoded = time.perf_counter() - submits.seconds
            loss = float(model.read_stats()[STATS_LOSS]) / (batch * (seq - 1))
            whole.append(time.perf_counter() - begin)
            host.append(encoded - begin)
            if not math.isfinite(loss):
                raise TrainingError(f"the loss of step {step} is {loss}: use other weights")
            model.zero_stats()
            progress()
    counted = Spread.of(whole[_WARM_UP:])
    return StepTimes(whole[0], counted, Spread.of(host[_WARM_UP:]).median / counted.median, loss)


def total_steps(steps: int) -> int:
    """Steps, with warm-up."""
    return steps + _WARM_UP
