"""Options of a step: everything that decides which launches it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qlora_wgpu.ops.cross_entropy import PLAIN, Objective


@dataclass(frozen=True)
class StepOptions:
    """One step's shape and what is computed; equal options make equal programs.

    Attributes:
        kind: ``"train"`` for loss and gradient, ``"loss"`` for the loss alone.
        batch: Sequences.
        seq: Tokens of each, padding included.
        checkpointing: Whether layers are recomputed in the backward.
        objective: The loss that is minimized.
        noise: NEFTune's α.
        router_aux_loss_coef: Factor of the loss that balances experts; None leaves it to
            config.json.
    """

    kind: Literal["train", "loss"]
    batch: int
    seq: int
    checkpointing: bool = False
    objective: Objective = PLAIN
    noise: float = 0.0
    router_aux_loss_coef: float | None = 0.0


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a model's training steps, whatever their shape.

    Attributes:
        checkpointing: Whether layers are recomputed in the backward.
        objective: The loss that is minimized.
        noise: NEFTune's α.
        router_aux_loss_coef: As in ``StepOptions``.
    """

    checkpointing: bool = False
    objective: Objective = PLAIN
    noise: float = 0.0
    router_aux_loss_coef: float | None = None

    def train(self, batch: int, seq: int) -> StepOptions:
        """A training step of this shape."""
        return StepOptions(
            "train",
            batch,
            seq,
            self.checkpointing,
            self.objective,
            self.noise,
            self.router_aux_loss_coef,
        )

    def step(self, kind: str, batch: int, seq: int) -> StepOptions:
        """A step of this kind; the loss that is measured is always the plain one."""
        return self.train(batch, seq) if kind == "train" else StepOptions("loss", batch, seq)
