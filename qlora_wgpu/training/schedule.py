"""The table of what changes from step to step: rates, bias corrections."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import OptimConfig
from qlora_wgpu.training.learning_rates import learning_rates

STEP_NUMBERS = 4
"""Numbers of a row of the table."""

_AT_ONCE = 4096


def step_table(
    optim: OptimConfig, total: int, steps: range | None = None
) -> npt.NDArray[np.float32]:
    """The values that AdamW's kernel reads at a step: rate of A, 1 - β₁ᵗ, √(1 - β₂ᵗ), rate of B.

    Returns:
        (steps, 4) float32; bias corrections are of t = 1, 2, …
    """
    wanted = range(total) if steps is None else steps
    t = np.arange(wanted.start, wanted.stop, dtype=np.float64) + 1.0
    table = np.zeros((len(t), STEP_NUMBERS))
    table[:, 0] = learning_rates(optim, total, steps)
    table[:, 1] = 1.0 - optim.adam_beta1**t
    table[:, 2] = np.sqrt(1.0 - optim.adam_beta2**t)
    table[:, 3] = optim.loraplus_lr_ratio * table[:, 0]
    return table.astype(np.float32)


class Schedule:
    """The rows of ``step_table``, a few thousand at a time: a run may have a billion.

    Attributes:
        held: A learning rate in place of the schedule's from now on, or None.
        factor: What rates are multiplied by from now on.
    """

    def __init__(self, optim: OptimConfig, total: int) -> None:
        """Makes nothing yet."""
        self.held: float | None = None
        self.factor = 1.0
        self._optim = optim
        self._total = total
        self._steps = range(0)
        self._rows = np.zeros((0, STEP_NUMBERS), np.float32)
        self._rates = np.zeros(0)

    def row(self, step: int) -> npt.NDArray[np.float32]:
        """The row of step 1, 2, …."""
        at = self._at(step)
        row: npt.NDArray[np.float32] = self._rows[at]
        if self.held is not None or self.factor != 1.0:
            row, rate = row.copy(), self.rate(step)
            row[0], row[3] = rate, self._optim.loraplus_lr_ratio * rate
        return row

    def rate(self, step: int) -> float:
        """The learning rate of step 1, 2, …, before it is rounded to float32."""
        return self.factor * self.planned(step)

    def planned(self, step: int) -> float:
        """The one that it would be without the factor."""
        at = self._at(step)
        return float(self._rates[at]) if self.held is None else self.held

    def _at(self, step: int) -> int:
        """Where a step's row is, made now if it is not there."""
        if step - 1 not in self._steps:
            first = (step - 1) // _AT_ONCE * _AT_ONCE
            self._steps = range(first, min(first + _AT_ONCE, self._total))
            self._rows = step_table(self._optim, self._total, self._steps)
            self._rates = learning_rates(self._optim, self._total, self._steps)
        return self._steps.index(step - 1)
