"""Noticing a run that has gone wrong before it wastes hours."""

from __future__ import annotations

from collections import deque

_FIRST, _LAST = 5, 10  # steps
_WORSE = 1.5  # nats


class Divergence:
    """Watches the loss: ten steps in a row that are far worse than the first five."""

    def __init__(self) -> None:
        """Has seen nothing yet."""
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=_LAST)

    def diverged(self, loss: float) -> bool:
        """Notes a step's mean loss."""
        if len(self._first) < _FIRST:
            self._first.append(loss)
        self._last.append(loss)
        limit = sum(self._first) / len(self._first) + _WORSE
        return len(self._last) == _LAST and min(self._last) > limit
