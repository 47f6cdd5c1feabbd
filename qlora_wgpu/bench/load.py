"""Work that keeps a GPU busy, so that its clock rises before something is timed and stays up.

A GPU at rest lowers its clock, some to a fifth. Only work raises it again, after a while, and work
that is waited for piece by piece hardly does.
"""

from __future__ import annotations

import time

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.wgsl import load_shader

_GROUPS, _GROUP = 4096, 32  # enough to fill every GPU
_QUEUED = 4  # submits that are waited for together
_SECONDS = 0.005  # of each, once it is known how much work that is
_FIRST_TURNS, _MOST_TURNS = 4, 32_768
_RISES, _NEAR = 1.02, 0.95  # what is less, and what is nearer, is scatter
_SETTLED, _MOST_SECONDS = 1.0, 2.0  # without a rise, which some drivers wait with, and in all


class Load:
    """Multiply-adds for a GPU; a software GPU, whose clock is the host's, is left alone."""

    def __init__(self, device: Device) -> None:
        """Makes the work ready; what it takes counts as nobody's memory.

        Args:
            device: What is kept busy; its ``pace`` knows the fastest that the work was done.
        """
        self._device = device
        self._turns = _FIRST_TURNS
        if device.is_cpu:
            return
        self._shader = load_shader("bench/fma.wgsl")
        usage = device.backend.module.BufferUsage
        flags = usage.STORAGE | usage.COPY_DST | usage.COPY_SRC | usage.UNIFORM
        nbytes = 4 * _GROUPS * _GROUP
        with device.driver_call("allocating room for busy work"):
            self._sums = device.raw.create_buffer(size=nbytes, usage=flags)
            self._params = device.raw.create_buffer(size=16, usage=flags)
        windows = {"params": (self._params, 0, 16), "sums": (self._sums, 0, nbytes)}
        group = device.bind_group(self._shader, windows)
        self._dispatch = device.pipeline(self._shader), group, (_GROUPS, 1, 1)

    def raise_clock(self) -> None:
        """Keeps the GPU busy until it works as fast as it has before, or no longer gets faster."""
        if self._device.is_cpu:
            return
        known, fastest = self._device.pace.busy_rate, 0.0
        begin = now = rose = time.perf_counter()
        while now - rose < _SETTLED and now - begin < _MOST_SECONDS:
            rate = self.run()
            now = time.perf_counter()
            if known and rate > _NEAR * known:
                return
            if rate > _RISES * fastest:
                fastest, rose = rate, now

    def clock(self) -> float:
        """What the GPU does now of the most that it has done; 1 for a software GPU."""
        return self.run() / self._device.pace.busy_rate if self._device.pace.busy_rate else 1.0

    def run(self) -> float:
        """Keeps the GPU busy for a moment, and waits; returns how much a second it has done."""
        device = self._device
        if device.is_cpu:
            return 0.0
        values = {"turns": self._turns, "factor": 0.5, "summand": 1.0}
        device.write(self._params, self._shader.pack_params(values))
        device.read(self._sums, 4)  # what was handed in before is none of it
        begin = time.perf_counter()
        for _ in range(_QUEUED):
            device.dispatch(*self._dispatch)
        device.read(self._sums, 4)
        seconds = time.perf_counter() - begin
        rate = _QUEUED * self._turns / seconds
        # A clock that falls again must not make it too long for the driver.
        aim = min(_SECONDS, device.pace.limit / 10) * rate
        self._turns = max(1, min(int(aim), 4 * self._turns, _MOST_TURNS))
        device.pace.busy_rate = max(device.pace.busy_rate, rate)
        return rate
