"""The state of a run besides its tensors: kept in every checkpoint, so that it can go on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from qlora_wgpu.config import EvalConfig
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.training.plateau import Plateau


@dataclass
class RunState:
    """Figures of a run so far.

    Attributes:
        step: Steps done.
        num_tokens: Tokens trained on, padding not counted.
        logged_step: The last step that metrics.jsonl has a row of.
        window: Loss sum, label tokens, hits and sum of the losses that balance experts, of each
            step since the last logged one; an older version kept no hits.
        metrics: Sums of an objective over answers in these steps (``ops/preference.py``).
        learning_rate: The last step's.
        grad_norm: The last step's.
        last_loss: Mean loss of the last logged steps.
        eval_loss_before: Held-out loss before the first step.
        eval_loss: The latest one, after ``eval_step`` steps.
        eval_step: When it was measured.
        best_loss: The one of the best evaluation.
        best_step: When it was measured.
        best_figure: What made it the best; None where that is the loss in an older version.
        aim: What makes an evaluation the best: ``EvalConfig.aim``.
        without_gain: Evaluations in a row that were not better by the user's threshold.
        finished: Whether the run has ended, with all that belongs to its end.
        seconds: Time that its parts have taken, from each one's first step on.
        total_steps: Steps that the run was to have; 0 where an older version did not say.
        plateau: The schedule's, where it follows evaluations.
        rate_factor: What the schedule's learning rates are multiplied by, as the program asked.
        log_digest: A hash of the rows in metrics.jsonl; None where an older version kept none.
    """

    step: int = 0
    num_tokens: int = 0
    logged_step: int = 0
    window: list[tuple[float, float, float | None, float]] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    learning_rate: float = 0.0
    grad_norm: float = 0.0
    last_loss: float | None = None
    eval_loss_before: float | None = None
    eval_loss: float | None = None
    eval_step: int = -1
    best_loss: float | None = None
    best_step: int = -1
    best_figure: float | None = None
    aim: str = EvalConfig().aim
    without_gain: int = 0
    finished: bool = False
    seconds: float = 0.0
    total_steps: int = 0
    plateau: Plateau | None = None
    rate_factor: float = 1.0
    log_digest: str | None = None

    def add_metrics(self, sums: Sequence[float]) -> None:
        """Adds a step's sums of an objective over answers; an older version kept fewer."""
        both = zip_longest(self.metrics, sums, fillvalue=0.0)
        self.metrics = [before + own for before, own in both]

    def to_json(self) -> str:
        """The state as text, from which floats come back bit by bit."""
        return json.dumps(asdict(self), allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> RunState:
        """Reads it back.

        Raises:
            CheckpointError: If it is no such text.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            state = cls(**values)
            state.window = [_figures(*figures) for figures in state.window]
            state.metrics = [float(value) for value in state.metrics]
            state.plateau = Plateau(**values["plateau"]) if values.get("plateau") else None
            if state.best_figure is None and state.aim == EvalConfig().aim:
                state.best_figure = state.best_loss
            step = int(state.step)
        except (ValueError, TypeError) as err:
            raise CheckpointError(f"{where} is damaged: {err}") from err
        if step < 0:
            raise CheckpointError(f"{where} is damaged: step {step}")
        return state

    def evaluated(self, loss: float, figure: float, step: int, settings: EvalConfig) -> bool:
        """Notes an evaluation; whether it is the best.

        Args:
            loss: The held-out loss.
            figure: What the best one has most or least of (``settings.metric_for_best_model``).
            step: The steps done.
            settings: Which of both, and the least change that patience counts.
        """
        self.eval_loss, self.eval_step = loss, step
        gain = math.inf
        if self.best_figure is not None:
            sign = 1.0 if settings.more_is_better else -1.0
            gain = sign * (figure - self.best_figure)
        counts = gain > settings.early_stopping_threshold
        self.without_gain = 0 if counts else self.without_gain + 1
        if gain <= 0:
            return False
        self.best_loss, self.best_figure, self.best_step = loss, figure, step
        return True

    def forget_best(self) -> None:
        """The next evaluation is the best one."""
        self.best_loss, self.best_figure, self.best_step = None, None, -1
        self.without_gain = 0


def _figures(
    loss: Any, count: Any, hits: Any = None, balance: Any = 0.0
) -> tuple[float, float, float | None, float]:
    """A step's sums, as JSON has them."""
    return float(loss), float(count), None if hits is None else float(hits), float(balance)
