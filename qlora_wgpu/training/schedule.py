"""The table of what changes from step to step: rates, bias corrections."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import OptimConfig

STEP_NUMBERS = 4
"""Numbers of a row of the table."""

_AT_ONCE = 4096


def warmup_steps(optim: OptimConfig, total: int) -> int:
    """Steps of linear warm-up from zero."""
    if optim.lr_scheduler_type == "constant":
        return 0
    return optim.warmup_steps or math.ceil(total * optim.warmup_ratio)


def learning_rates(
    optim: OptimConfig, total: int, steps: range | None = None
) -> npt.NDArray[np.float64]:
    """The learning rate of each step, as Hugging Face's schedules of the same names give it.

    Args:
        optim: Kind of schedule, peak rate and warm-up.
        total: Steps of the run.
        steps: Those that are wanted, counted from 0; all by default.

    Returns:
        (steps) float64. With warm-up the first is 0, as there.
    """
    warmup = warmup_steps(optim, total)
    step = _numbers(steps or range(total))
    share = np.clip((step - warmup) / max(total - warmup, 1), 0.0, 1.0)
    if optim.lr_scheduler_type == "linear":
        after = 1.0 - share
    elif optim.lr_scheduler_type == "cosine":
        after = 0.5 * (1.0 + np.cos(np.pi * share))
    else:
        after = np.ones(len(step))
    factor = np.where(step < warmup, step / max(warmup, 1), after)
    return optim.learning_rate * factor


def step_table(
    optim: OptimConfig, total: int, steps: range | None = None
) -> npt.NDArray[np.float32]:
    """The values that AdamW's kernel reads at a step: rate of A, 1 - β₁ᵗ, √(1 - β₂ᵗ), rate of B.

    Returns:
        (steps, 4) float32; bias corrections are of t = 1, 2, …
    """
    t = _numbers(steps or range(total)) + 1.0
    table = np.zeros((len(t), STEP_NUMBERS))
    table[:, 0] = learning_rates(optim, total, steps)
    table[:, 1] = 1.0 - optim.adam_beta1**t
    table[:, 2] = np.sqrt(1.0 - optim.adam_beta2**t)
    table[:, 3] = optim.loraplus_lr_ratio * table[:, 0]
    return table.astype(np.float32)


class Schedule:
    """The rows of ``step_table``, a few thousand at a time: a run may have a billion."""

    def __init__(self, optim: OptimConfig, total: int) -> None:
        """Makes nothing yet."""
        self._optim = optim
        self._total = total
        self._steps = range(0)
        self._rows = np.zeros((0, STEP_NUMBERS), np.float32)
        self._rates = np.zeros(0)

    def row(self, step: int) -> npt.NDArray[np.float32]:
        """The row of step 1, 2, …."""
        at = self._at(step)
        row: npt.NDArray[np.float32] = self._rows[at]
        return row

    def rate(self, step: int) -> float:
        """The learning rate of step 1, 2, …, before it is rounded to float32."""
        at = self._at(step)
        return float(self._rates[at])

    def _at(self, step: int) -> int:
        """Where a step's row is, made now if it is not there."""
        if step - 1 not in self._steps:
            first = (step - 1) // _AT_ONCE * _AT_ONCE
            self._steps = range(first, min(first + _AT_ONCE, self._total))
            self._rows = step_table(self._optim, self._total, self._steps)
            self._rates = learning_rates(self._optim, self._total, self._steps)
        return self._steps.index(step - 1)


def _numbers(steps: range) -> npt.NDArray[np.float64]:
    return np.arange(steps.start, steps.stop, dtype=np.float64)
