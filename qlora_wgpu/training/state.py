"""The state of a run besides its tensors: kept in every checkpoint, so that it can go on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from qlora_wgpu.errors import CheckpointError


@dataclass
class RunState:
    """Figures of a run so far.

    Attributes:
        step: Steps done.
        num_tokens: Tokens trained on, padding not counted.
        data: Fingerprint of the training data.
        window: Loss sum and label tokens of each step since the last logged one.
        last_loss: Mean loss of the last logged steps.
        eval_loss_before: Held-out loss before the first step.
        eval_loss: The latest one, after ``eval_step`` steps.
        eval_step: When it was measured.
        best_loss: The lowest one.
        best_step: When it was measured.
        without_gain: Evaluations since the best one.
    """

    step: int = 0
    num_tokens: int = 0
    data: str = ""
    window: list[tuple[float, float]] = field(default_factory=list)
    last_loss: float | None = None
    eval_loss_before: float | None = None
    eval_loss: float | None = None
    eval_step: int = -1
    best_loss: float | None = None
    best_step: int = -1
    without_gain: int = 0

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
            state.window = [(float(loss), float(count)) for loss, count in state.window]
            step = int(state.step)
        except (ValueError, TypeError) as err:
            raise CheckpointError(f"{where} is damaged: {err}") from err
        if step < 0:
            raise CheckpointError(f"{where} is damaged: step {step}")
        return state

    def evaluated(self, loss: float, step: int, threshold: float) -> bool:
        """Notes a held-out loss; whether it is the best one, by more than ``threshold``."""
        self.eval_loss, self.eval_step = loss, step
        if self.best_loss is None or loss < self.best_loss - threshold:
            self.best_loss, self.best_step, self.without_gain = loss, step, 0
            return True
        self.without_gain += 1
        return False
