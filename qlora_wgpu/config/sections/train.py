"""The sections of the training loop, and of the optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from qlora_wgpu.config.schedules import check_schedule
from qlora_wgpu.config.section import FREE_ON_RESUME, Section
from qlora_wgpu.config.values import (
    OPTIMIZERS,
    Float,
    LossType,
    MaxSteps,
    OptimizerName,
    PositiveInt,
    ScheduleName,
)
from qlora_wgpu.limits import BETA, LEARNING_RATES, STEPS

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


LION_BETA2 = 0.99


def _beta2_of(name: str) -> float:
    """The decay rate that an optimizer has where nobody says it."""
    if OPTIMIZERS.get(name.lower()) == "lion":
        return LION_BETA2
    default: float = OptimConfig.model_fields["adam_beta2"].default
    return default


def has_own_beta2(values: Mapping[str, Any]) -> bool:
    """Whether a file's section says no more than the decay rate that its optimizer begins with.

    A file with every default filled in, such as a run's, says that without meaning it.
    """
    return bool(values.get("adam_beta2") == _beta2_of(str(values.get("name"))))


class OptimConfig(Section):
    """The optimizer and its schedule."""

    name: OptimizerName = Field(
        "adamw",
        description="The optimizer: adamw; adamw_8bit, whose moments take a quarter of the "
        "memory, in 8 bits as bitsandbytes' (also adamw_bnb_8bit, paged_adamw_8bit); or lion, "
        "whose one moment takes half, for learning rates a fifth to a tenth as large.",
    )
    learning_rate: Float = Field(
        2e-4, gt=0.0, ge=LEARNING_RATES[0], le=LEARNING_RATES[1], description="Peak learning rate."
    )
    lr_scheduler_type: ScheduleName = Field(
        "cosine",
        description="Shape of the learning rate, by transformers' names: constant, linear, cosine, "
        "constant_with_warmup, cosine_with_restarts, cosine_with_min_lr, "
        "cosine_warmup_with_min_lr, polynomial, inverse_sqrt, warmup_stable_decay or "
        "reduce_lr_on_plateau; constant and the last have no warm-up at all.",
    )
    lr_scheduler_kwargs: dict[str, Any] = Field(
        {},
        description="Further arguments of the schedule, as in transformers, such as {min_lr_rate: "
        "0.1} or {num_decay_steps: 200}.",
    )
    warmup_ratio: Float = Field(
        0.03, ge=0.0, le=1.0, description="Share of all steps spent on linear warm-up from zero."
    )
    warmup_steps: int = Field(
        0, ge=0, le=STEPS, description="Steps of linear warm-up; 0 means that warmup_ratio decides."
    )
    loraplus_lr_ratio: Float = Field(
        1.0, gt=0.0, description="Learning rate of B over that of A (LoRA+, where 16 is usual)."
    )
    weight_decay: Float = Field(0.0, ge=0.0, description="Decoupled weight decay.")
    max_grad_norm: Float = Field(
        1.0, ge=0.0, description="Largest global norm of the gradient; 0 turns clipping off."
    )
    adam_beta1: Float = Field(
        0.9,
        ge=0.0,
        lt=1.0,
        le=BETA,
        description="Decay rate of the first moment; with lion, the moment's share in an update.",
    )
    adam_beta2: Float = Field(
        0.999,
        ge=0.0,
        lt=1.0,
        le=BETA,
        description="Decay rate of the second moment; with lion, of its only one, and 0.99 unless "
        "you say otherwise.",
    )
    adam_epsilon: Float = Field(
        1e-8, gt=0.0, description="Term added to the denominator of AdamW's update."
    )

    @model_validator(mode="before")
    @classmethod
    def _rate_of_lion(cls, values: Any) -> Any:
        """Gives Lion's moment the decay rate that it was published with."""
        if (
            isinstance(values, Mapping)
            and OPTIMIZERS.get(str(values.get("name")).lower()) == "lion"
        ):
            return {"adam_beta2": LION_BETA2, **values}
        return values

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Pydantic's, in which another optimizer comes with the decay rate that it begins with."""
        changes = dict(update or {})
        if "name" in changes and "adam_beta2" not in changes and not self.says_beta2:
            changes["adam_beta2"] = _beta2_of(str(changes["name"]))
        return super().model_copy(update=changes, deep=deep)

    @property
    def says_beta2(self) -> bool:
        """Whether somebody chose ``adam_beta2``: else it goes with the optimizer."""
        was = _beta2_of(self.name)
        is_set = "adam_beta2" in self.model_fields_set and was != LION_BETA2
        return is_set or self.adam_beta2 != was

    @field_validator("lr_scheduler_kwargs")
    @classmethod
    def _of_the_schedule(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if {"lr_scheduler_type", "learning_rate"} <= info.data.keys():
            check_schedule(info.data["lr_scheduler_type"], value, info.data["learning_rate"])
        return value
