"""Bytes that are taken of a device, by kind."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class MemoryCounter:
    """Bytes of live buffers by kind, and the most there ever were."""

    by_kind: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    _counts: bool = True

    def add(self, kind: str, nbytes: int, holder: Any) -> None:
        """Counts ``nbytes`` more of a kind, for as long as ``holder`` lives."""
        if not self._counts:
            return
        self.by_kind[kind] += nbytes
        self.peak = max(self.peak, self.total)
        weakref.finalize(holder, self._freed, kind, nbytes).atexit = False

    def _freed(self, kind: str, nbytes: int) -> None:
        self.by_kind[kind] -= nbytes

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is made within is there for a moment only, and counts nowhere."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.by_kind.values())
