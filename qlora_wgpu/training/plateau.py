"""A learning rate that falls where evaluations get no better, by torch's rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qlora_wgpu.config import Config, OptimConfig
from qlora_wgpu.config.schedules import PLATEAU
from qlora_wgpu.errors import ConfigError

_FACTOR, _PATIENCE, _THRESHOLD, _EPS = 0.1, 10, 1e-4, 1e-8  # torch's defaults


@dataclass
class Plateau:
    """What is known of the evaluations so far.

    Attributes:
        rate: The learning rate from here on.
        best: The best figure; None before the first one.
        bad: Evaluations in a row that were not better.
        cooldown: Evaluations to come that do not count.
    """

    rate: float
    best: float | None = None
    bad: int = 0
    cooldown: int = 0

    def measured(self, figure: float, optim: OptimConfig, *, more_is_better: bool = False) -> bool:
        """Takes an evaluation into account; whether it changes the rate.

        Args:
            figure: Its loss, or what else steers.
            optim: What the schedule was told.
            more_is_better: Torch's ``mode: max``, unless the schedule was told its own.
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
    """What a run begins with; None with a schedule by steps.

    Args:
        config: The settings.
        held_out: Whether there is held-out data.

    Raises:
        ConfigError: If nothing would ever be measured while the run goes on.
    """
    if config.optim.lr_scheduler_type != PLATEAU:
        return None
    if not held_out or config.eval.eval_steps == 0:
        needs = "eval.eval_steps above 0" if held_out else "data.eval or data.eval_split"
        raise ConfigError(
            f"optim.lr_scheduler_type {PLATEAU} goes by evaluations: set {needs}, or choose a "
            "schedule by steps such as cosine"
        )
    return Plateau(config.optim.learning_rate)
