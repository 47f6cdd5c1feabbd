"""The section of the optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from qlora_wgpu.config.schedules import check_schedule
from qlora_wgpu.config.section import Section
from qlora_wgpu.config.values import OPTIMIZERS, Float, OptimizerName, ScheduleName
from qlora_wgpu.limits import BETA, LEARNING_RATES, STEPS

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
