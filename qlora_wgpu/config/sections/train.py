"""The section of the training loop."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from qlora_wgpu.config.section import FREE_ON_RESUME, Section
from qlora_wgpu.config.values import Float, LossType, MaxSteps, PositiveInt

PAIR_LOSSES = (
    "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "sigmoid_norm",
)  # fmt: skip
LOSSES = {
    "sft": ("nll", "dft"),
    "dpo": PAIR_LOSSES,
    "orpo": (),
    "kto": ("kto", "apo_zero_unpaired"),
}


class TrainConfig(Section):
    """The training loop."""

    num_train_epochs: Annotated[float, FREE_ON_RESUME] = Field(
        1.0, gt=0.0, description="Number of passes over the training data; may be a fraction."
    )
    max_steps: Annotated[MaxSteps, FREE_ON_RESUME] = Field(
        -1, description="Number of optimizer steps, which overrides num_train_epochs; -1 for none."
    )
    per_device_train_batch_size: PositiveInt = Field(1, description="Rows in a micro-batch.")
    gradient_accumulation_steps: PositiveInt = Field(
        16, description="Micro-batches whose gradients are summed for one optimizer step."
    )
    gradient_checkpointing: Annotated[bool, FREE_ON_RESUME] = Field(
        True,
        description="Whether layers are recomputed in the backward pass to save memory; with "
        "false, those still are that device.memory has no room for.",
    )
    compute_dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Type of matmul operands; sums are float32 in either case."
    )
    gradient_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type that the adapter's gradient is kept in; with bfloat16 it takes half the "
        "memory, and each micro-batch's is added in float32 and rounded.",
    )
    label_smoothing_factor: Float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="Share of each label that is spread over the whole vocabulary, in training "
        "alone; held-out losses have none.",
    )
    z_loss_weight: Float = Field(
        0.0,
        ge=0.0,
        description="Weight of the squared logarithm of the softmax's normalizer, added to the "
        "loss in training; 1e-4 is usual, 0 turns it off.",
    )
    router_aux_loss_coef: Float | None = Field(
        None,
        ge=0.0,
        description="Factor of the loss that balances a mixture's experts, as transformers has "
        "it, added in training and logged as aux_loss; 0 turns it off, null leaves it to "
        "config.json, which asks for it by output_router_logits: true.",
    )
    neftune_noise_alpha: Float = Field(
        0.0,
        ge=0.0,
        description="Strength of the noise that is added to embeddings in training (NEFTune); 5 is "
        "usual, 0 turns it off.",
    )
    seed: int = Field(
        0, ge=0, lt=2**32, description="Seed of data order, dropout and adapter initialization."
    )
    objective: Literal["sft", "dpo", "orpo", "kto"] = Field(
        "sft",
        description="What is learnt: rows as they are (sft), which of two answers is better "
        "(dpo, orpo), or whether an answer is good (kto); as TRL has them.",
    )
    loss_type: LossType = Field(
        None,
        description="Loss of the objective, null for TRL's default: nll or dft of sft; "
        f"{', '.join(PAIR_LOSSES)} of dpo; kto or apo_zero_unpaired of kto.",
    )
    beta: Float = Field(
        0.1,
        gt=0.0,
        description="How strongly dpo and kto are kept near the reference, which is the model as "
        "the run begins; with orpo, the weight of the odds ratio.",
    )
    label_smoothing: Float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="Share of dpo's pairs that are thought to be the wrong way round, with the "
        "losses robust and exo_pair.",
    )
    desirable_weight: Float = Field(
        1.0,
        ge=0.0,
        description="Weight of kto's good answers in the loss, which is divided by the number of "
        "all answers; with 0 nothing is learnt from them.",
    )
    undesirable_weight: Float = Field(
        1.0, ge=0.0, description="Weight of kto's bad answers in the loss, likewise."
    )

    @field_validator("loss_type")
    @classmethod
    def _of_the_objective(cls, value: str | None, info: ValidationInfo) -> str | None:
        objective = info.data.get("objective", "sft")
        allowed = LOSSES[objective]
        if value is not None and value not in allowed:
            names = " or ".join(allowed) if allowed else "null"
            raise ValueError(f"must be {names} with train.objective: {objective}")
        problem = _beside(objective, value, info.data)
        if problem:
            raise ValueError(problem)
        return value

    @field_validator("label_smoothing")
    @classmethod
    def _of_the_loss(cls, value: float, info: ValidationInfo) -> float:
        loss = info.data.get("loss_type")
        if loss == "exo_pair" and value == 0:
            raise ValueError("must be above 0 with train.loss_type: exo_pair; 0.001 is usual")
        if loss == "robust" and value >= 0.5:
            raise ValueError("must be below 0.5 with train.loss_type: robust")
        if value > 0 and loss not in ("robust", "exo_pair"):
            raise ValueError(
                "belongs to train.loss_type robust and exo_pair of dpo; for sft there is "
                "train.label_smoothing_factor"
            )
        return value

    @field_validator("desirable_weight", "undesirable_weight")
    @classmethod
    def _of_kto(cls, value: float, info: ValidationInfo) -> float:
        if value != 1.0 and info.data.get("objective", "kto") != "kto":
            raise ValueError("belongs to train.objective: kto")
        if value == info.data.get("desirable_weight") == 0:
            raise ValueError("must be above 0 beside train.desirable_weight: 0")
        return value

    @property
    def loss(self) -> str:
        """The loss: ``loss_type``, or the objective's default."""
        return self.loss_type or {"sft": "nll", "dpo": "sigmoid"}.get(
            self.objective, self.objective
        )

    @property
    def has_pairs(self) -> bool:
        """Whether a row of the data is a pair of answers."""
        return self.objective in ("dpo", "orpo")


def _beside(objective: str, loss: str | None, values: dict[str, Any]) -> str:
    """What an objective does not go together with, of the keys before it."""
    if objective == "sft" and loss != "dft":
        return ""
    what = "train.loss_type: dft" if objective == "sft" else f"train.objective: {objective}"
    names = ["label_smoothing_factor", "z_loss_weight"]
    if objective != "sft":
        names += ["neftune_noise_alpha", "router_aux_loss_coef"]
    for name in names:
        if values.get(name):
            return f"cannot stand beside train.{name}, which is not computed with {what}"
    return ""
