"""Options of a step: everything that decides which launches it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qlora_wgpu.ops.cross_entropy import PLAIN, Objective

StepKind = Literal["train", "loss", "sums", "divergence"]


@dataclass(frozen=True)
class StepOptions:
    """One step's shape and what is computed; equal options make equal programs.

    Attributes:
        kind: ``"train"`` for loss and gradient, ``"loss"`` for the loss alone, ``"sums"`` for what
            the model says of each sample's answer, ``"divergence"`` for how far that is from what
            the reference says.
        batch: Sequences.
        seq: Tokens of each, padding included.
        checkpointing: Whether layers are recomputed in the backward.
        objective: The loss that is minimized.
        noise: NEFTune's α.
        router_aux_loss_coef: Factor of the loss that balances experts; None leaves it to
            config.json.
    """

    kind: StepKind
    batch: int
    seq: int
    checkpointing: bool = False
    objective: Objective = PLAIN
    noise: float = 0.0
    router_aux_loss_coef: float | None = 0.0

    @property
    def is_sampled(self) -> bool:
        """Whether a micro-batch's samples are told apart."""
        return self.objective.preference is not None or self.kind in ("sums", "divergence")


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

    def step(self, kind: StepKind, batch: int, seq: int) -> StepOptions:
        """A step of this kind; of answers what is trained is measured, else the plain loss."""
        if kind == "train":
            return self.train(batch, seq)
        if kind == "loss" and self.objective.preference is not None:
            return StepOptions(kind, batch, seq, objective=self.objective)
        return StepOptions(kind, batch, seq)
