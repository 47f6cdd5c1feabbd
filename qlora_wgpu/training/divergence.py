"""Losses that went wrong before they waste hours, and those that get no better."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.config import Config, OptimConfig
from qlora_wgpu.config.sections.train import PLATEAU
from qlora_wgpu.errors import ConfigError

# ---- losses that go wrong ------------------------------------------------------------------------

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
        """Has seen nothing yet."""
        self._uniform = uniform
        self._steps = 0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=_LAST)
        self._lost: deque[str | None] = deque(maxlen=_LAST)

    def diverged(self, loss: float, norm: float = 1.0) -> str | None:
        """Notes a step's loss and gradient; how the last ten have gone wrong, or None."""
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


# ---- figures that get no better ------------------------------------------------------------------

_FACTOR, _PATIENCE, _THRESHOLD, _EPS = 0.1, 10, 1e-4, 1e-8  # torch's defaults


@dataclass
class Plateau:
    """What torch's ``ReduceLROnPlateau`` keeps: the rate, and the evaluations so far."""

    rate: float  # the learning rate from here on
    best: float | None = None  # the best figure; None before the first one
    bad: int = 0  # evaluations in a row that were not better
    cooldown: int = 0  # evaluations to come that do not count

    def measured(self, figure: float, optim: OptimConfig, *, more_is_better: bool = False) -> bool:
        """Takes an evaluation's figure into account; whether it changes the rate.

        Where more of it is better, torch's mode is ``max``, unless the schedule was told its own.
        """
        given = optim.lr_scheduler_kwargs
        sign = 1.0 if given.get("mode", "max" if more_is_better else "min") == "max" else -1.0
        if self.best is None or sign * figure > sign * self._to_beat(self.best, given, sign):
            self.best, self.bad = figure, 0
        else:
            self.bad += 1
        if self.cooldown > 0:
            self.cooldown, self.bad = self.cooldown - 1, 0
        if self.bad <= given.get("patience", _PATIENCE):
            return False
        self.cooldown, self.bad = given.get("cooldown", 0), 0
        lower = max(self.rate * given.get("factor", _FACTOR), given.get("min_lr", 0.0))
        if self.rate - lower <= given.get("eps", _EPS):
            return False
        self.rate = lower
        return True

    def _to_beat(self, best: float, given: dict[str, Any], sign: float) -> float:
        """What a figure must be beyond to be the best."""
        threshold = sign * float(given.get("threshold", _THRESHOLD))
        if given.get("threshold_mode", "rel") == "rel":
            return best * (1.0 + threshold)
        return best + threshold


def first_plateau(config: Config, *, held_out: bool) -> Plateau | None:
    """What a run begins with; None with a schedule by steps."""
    if config.optim.lr_scheduler_type != PLATEAU:
        return None
    if not held_out or config.eval.eval_steps == 0:
        needs = "eval.eval_steps above 0" if held_out else "data.eval or data.eval_split"
        raise ConfigError(
            f"optim.lr_scheduler_type {PLATEAU} goes by evaluations: set {needs}, or choose a "
            "schedule by steps such as cosine"
        )
    return Plateau(config.optim.learning_rate)
