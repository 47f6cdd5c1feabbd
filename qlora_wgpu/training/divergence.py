"""Noticing a run that has gone wrong before it wastes hours."""

from __future__ import annotations

import math
from collections import deque

_FIRST, _LAST = 5, 10  # steps
_WORSE = 1.5  # nats
_LEARNT = 0.01  # nats below which a gradient may vanish
_UNIFORM = 0.1  # nats around a guess of any token alike
_HIGHER = 0.3  # nats above the first steps that are no chance of which rows came last
_FAR_ABOVE = "the loss is far above the first ones"
_NO_GRADIENT = "the gradient is zero"


class Divergence:
    """Watches loss and gradient for ten steps in a row that are far worse than the start.

    Steps are compared with the first five, which a run that fails at once has spoiled itself, and
    with a guess of any token alike: a model that is far worse than that, and than it was at the
    very first, has diverged. Where weights have grown so large that norms overflow, all logits are
    alike and the gradient is exactly zero, which no loss tells.
    """

    def __init__(self, uniform: float = math.inf) -> None:
        """Has seen nothing yet.

        Args:
            uniform: The loss of a guess of any token alike.
        """
        self._uniform = uniform
        self._steps = 0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=_LAST)
        self._lost: deque[str | None] = deque(maxlen=_LAST)

    def diverged(self, loss: float, norm: float = 1.0) -> str | None:
        """Notes a step's mean loss and its gradient's norm.

        Returns:
            How the last ten steps have gone wrong, or None.
        """
        if len(self._first) < _FIRST:
            self._first.append(loss)
        self._steps += 1
        self._last.append(loss)
        self._lost.append(self._what_is_lost(loss, norm))
        if len(self._last) < _LAST:
            return None
        if min(self._last) > sum(self._first) / len(self._first) + _WORSE:
            return _FAR_ABOVE
        return self._lost[-1] if all(self._lost) else None

    def ended(self) -> str | None:
        """How a run that ends here, perhaps before ten steps, has gone wrong, or None."""
        half, lost = math.ceil(self._steps / 2), list(self._lost)
        gone = lost[-2:] == [_NO_GRADIENT] * 2  # it does not come back
        if gone or (1 < half <= _LAST and all(lost[-half:])):
            return lost[-1]
        return None

    def in_vain(self) -> str | None:
        """What shows that a run which ends here has learnt nothing, or None.

        Adapters that grew too large may leave a model with a loss that is finite, steady, and no
        better than a guess.
        """
        if self._steps < _FIRST + _LAST:
            return None
        first, last = sum(self._first) / len(self._first), sum(self._last) / len(self._last)
        if all(abs(loss - self._uniform) < _UNIFORM for loss in self._last):
            return f"its last losses, {last:.2f}, are those of a guess of any token alike"
        if last > first + _HIGHER:
            return f"its last losses, {last:.2f}, are above its first ones, {first:.2f}"
        return None

    def _what_is_lost(self, loss: float, norm: float) -> str | None:
        if norm == 0 and loss > _LEARNT:
            return _NO_GRADIENT
        return _FAR_ABOVE if loss > max(self._first[0], self._uniform) + _WORSE else None
