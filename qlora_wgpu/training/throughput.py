"""Tokens per second over the last few steps, pauses left out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

_WINDOW = 10


class ThroughputMeter:
    """Measures over a window of steps: figures of two steps may arrive together."""

    def __init__(self) -> None:
        """Starts stopped at zero."""
        self._marks: deque[tuple[float, int]] = deque(maxlen=_WINDOW + 1)
        self._tokens = 0
        self._paused = 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._paused

    def start(self) -> None:
        """The first step begins."""
        self._marks.append((self._now(), self._tokens))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While it is entered, time does not count."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begin

    def add(self, tokens: int) -> None:
        """A step with this many tokens has ended."""
        self._tokens += tokens
        self._marks.append((self._now(), self._tokens))

    @property
    def tokens_per_second(self) -> float:
        """Over the steps of the window."""
        (t0, n0), (t1, n1) = self._marks[0], self._marks[-1]
        return (n1 - n0) / max(t1 - t0, 1e-9)
