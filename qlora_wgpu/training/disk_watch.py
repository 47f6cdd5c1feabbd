"""Whether steps wait for a disk that weights are read from."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from qlora_wgpu.graph.host_callbacks import Reading

_SHARE = 0.5  # of the time, from which on it is told
_STEPS, _SECONDS = 3, 10.0  # that are looked at, at least


class DiskWatch:
    """Compares what was waited for with what time has passed; tells of it once."""

    def __init__(self, reading: Reading, clock: Callable[[], float] = time.perf_counter) -> None:
        """Has seen no step yet.

        Args:
            reading: What is read, which grows.
            clock: Seconds.
        """
        self._reading, self._clock = reading, clock
        self._steps = -1  # the first one finds files that nobody has read before
        self._begin = self._bytes = self._waited = 0.0
        self._is_told = False

    def after_step(self) -> str:
        """A sentence, once enough steps have waited for the disk; else empty."""
        if self._is_told or not self._reading.nbytes:
            return ""
        self._steps += 1
        if not self._steps:
            self._begin = self._clock()
            self._bytes, self._waited = self._reading.nbytes, self._reading.seconds
            return ""
        passed, waited = self._clock() - self._begin, self._reading.seconds - self._waited
        if self._steps < _STEPS or passed < _SECONDS or waited < _SHARE * passed:
            return ""
        self._is_told = True
        nbytes = self._reading.nbytes - self._bytes
        return (
            f"steps wait for the disk {waited / passed:.0%} of their time: "
            f"{nbytes / self._steps / 1e9:,.2g} GB of weights a step are read from "
            f"{Path(self._reading.path).parent} at {nbytes / waited / 1e6:,.0f} MB/s; put them on "
            "a faster disk, end programs that take host memory, which would keep them, or raise "
            "device.memory"
        )
