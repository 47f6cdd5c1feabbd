"""Estimates how long launches take on a device: guessed at first, then measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Operations and bytes per second that slow GPUs of a kind reach in most kernels. A guess that is
# too low costs some submits in the first step; one that is too high may lose the device.
_GUESSES = {"DiscreteGPU": (1e12, 1e11), "CPU": (math.inf, math.inf)}
_SLOWEST = (1e11, 1e10)  # integrated and unknown GPUs
_LAUNCH = 1e-5  # minimum seconds of a launch
_TELLING = 2e-4  # minimum seconds for a meaningful rate: shorter launches mostly wait


@dataclass
class CostModel:
    """The rates of one device.

    Desktop systems abort work that takes too long: Windows after two seconds, macOS after a few
    hundred milliseconds. So work is submitted in pieces of bounded time. A launch's time is
    estimated from its operations and bytes: by the kind of GPU until launches of the same shader
    were measured, then by these measurements.
    """

    flops_per_second: float  # operations, before any measurement
    bytes_per_second: float  # bytes read and written, before any measurement
    limit: float  # seconds of work per submit
    busy_rate: float = field(
        default=0.0, kw_only=True
    )  # maximum busy work per second, for bench/timing
    _seen: dict[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of_kind(cls, kind: str, limit: float) -> CostModel:
        return cls(*_GUESSES.get(kind, _SLOWEST), limit)

    @property
    def is_bounded(self) -> bool:
        """Whether work is split by time: software GPUs run within the submit itself."""
        return math.isfinite(self.flops_per_second)

    def seconds(self, path: str, flops: int, nbytes: int) -> float:
        measured, guessed = self._seen.get(path, (1.0, 1.0))
        return _LAUNCH + self._guess(flops, nbytes) * measured / guessed

    def learn(self, path: str, flops: int, nbytes: int, seconds: float) -> None:
        guess = self._guess(flops, nbytes)
        if seconds < _TELLING or guess <= 0.0:
            return
        measured, guessed = self._seen.get(path, (0.0, 0.0))
        self._seen[path] = measured + seconds, guessed + guess

    def _guess(self, flops: int, nbytes: int) -> float:
        return max(flops / self.flops_per_second, nbytes / self.bytes_per_second)
