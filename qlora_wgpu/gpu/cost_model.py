"""How long launches take on a device: guessed at first, then measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Operations and bytes a second that slow GPUs of a kind reach in most kernels. A guess that is too
# low costs some submits of the first step; one that is too high may cost the device.
_GUESSES = {"DiscreteGPU": (1e12, 1e11), "CPU": (math.inf, math.inf)}
_SLOWEST = (1e11, 1e10)  # integrated GPUs, and what the driver has no name for
_LAUNCH = 1e-5  # seconds that a launch takes at least
_TELLING = 2e-4  # seconds of launches that tell of a rate: shorter ones wait more than they work


@dataclass
class CostModel:
    """The rates of one device.

    Desktop systems end work that takes too long: Windows after two seconds, macOS after a few
    hundred milliseconds. So work is handed to the driver in submits of bounded time. A launch's
    time follows from its operations and bytes: by the kind of the GPU until launches of the same
    shader were measured, then by these.
    """

    flops_per_second: float  # operations, before anything was measured
    bytes_per_second: float  # bytes read and written, likewise
    limit: float  # seconds of work of a submit
    busy_rate: float = field(default=0.0, kw_only=True)  # most busy work a second, for bench/timing
    _seen: dict[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of_kind(cls, kind: str, limit: float) -> CostModel:
        """A guess by a GPU's kind."""
        return cls(*_GUESSES.get(kind, _SLOWEST), limit)

    @property
    def is_bounded(self) -> bool:
        """Whether work is split by time at all: software GPUs work within the submit itself."""
        return math.isfinite(self.flops_per_second)

    def seconds(self, path: str, flops: int, nbytes: int) -> float:
        """How long a launch will take."""
        measured, guessed = self._seen.get(path, (1.0, 1.0))
        return _LAUNCH + self._guess(flops, nbytes) * measured / guessed

    def learn(self, path: str, flops: int, nbytes: int, seconds: float) -> None:
        """Notes what a launch took; arguments as of ``seconds``."""
        guess = self._guess(flops, nbytes)
        if seconds < _TELLING or guess <= 0.0:
            return
        measured, guessed = self._seen.get(path, (0.0, 0.0))
        self._seen[path] = measured + seconds, guessed + guess

    def _guess(self, flops: int, nbytes: int) -> float:
        return max(flops / self.flops_per_second, nbytes / self.bytes_per_second)
