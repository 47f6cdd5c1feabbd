"""The sections of the training loop, and of the optimizer and its learning rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from qlora_wgpu.config.section import FREE_ON_RESUME, Section
from qlora_wgpu.config.sections.grpo import POLICY_OBJECTIVES
from qlora_wgpu.config.values import (
    OPTIMIZERS,
    Float,
    Labels,
    LossType,
    MaxSteps,
    OptimizerName,
    PositiveInt,
    ScheduleName,
)
from qlora_wgpu.limits import BETA, LEARNING_RATES, STEPS

# ---- the training loop ---------------------------------------------------------------------------

PAIR_LOSSES = (
    "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "sigmoid_norm",
)  # fmt: skip
LOSSES = {
    "sft": ("nll", "dft"),
    "dpo": PAIR_LOSSES,
    "orpo": (),
    "kto": ("kto", "apo_zero_unpaired"),
    "grpo": (),
    "rloo": (),
    "reward": (),
    "classification": (),
}
SCORED = ("reward", "classification")
"""The objectives whose model scores whole sequences."""


class TrainConfig(Section):
    """The training loop."""

    num_train_epochs: Annotated[float, FREE_ON_RESUME] = Field(1.0, gt=0.0)
    """Number of passes over the training data; may be a fraction."""
    max_steps: Annotated[MaxSteps, FREE_ON_RESUME] = -1
    """Number of optimizer steps; -1 trains for num_train_epochs."""
    per_device_train_batch_size: PositiveInt = 1
    """Rows per micro-batch."""
    gradient_accumulation_steps: PositiveInt = 16
    """Micro-batches whose gradients are summed for one optimizer step."""
    gradient_checkpointing: Annotated[bool, FREE_ON_RESUME] = True
    """Whether layers are recomputed in the backward pass to save memory; with false, only those
    that do not fit into device.memory are."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of matmul operands (bf16 in transformers); sums are always float32."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the adapter's gradient; bfloat16 takes half the memory and rounds the sum after
    each micro-batch."""
    label_smoothing_factor: Float = Field(0.0, ge=0.0, lt=1.0)
    """Label smoothing of the training loss of sft; evaluation losses are not smoothed."""
    z_loss_weight: Float = Field(0.0, ge=0.0)
    """Weight of the z-loss, the squared log of the softmax's normalizer, in the training loss; 1e-4
    is usual, 0 disables it."""
    router_aux_loss_coef: Float | None = Field(None, ge=0.0)
    """Weight of transformers' load-balancing loss for mixtures of experts, logged as aux_loss; 0
    disables it, null uses config.json's if output_router_logits is true there."""
    neftune_noise_alpha: Float = Field(0.0, ge=0.0)
    """Scale of the noise added to embeddings in training (NEFTune); 5 is usual, 0 disables it."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of data order, dropout and adapter initialization."""
    objective: Literal["sft", "dpo", "orpo", "kto", "grpo", "rloo", "reward", "classification"] = (
        "sft"
    )
    """Training objective, as in TRL: supervised (sft), pairs of a chosen and a rejected answer
    (dpo, orpo), answers labeled desirable or undesirable (kto), completions that are sampled and
    scored by reward functions (grpo, rloo; see the section grpo), a reward model on pairs
    (reward), or a classifier of text or chats with a label (classification)."""
    loss_type: LossType = Field(
        None,
        description="Loss of the objective, as in TRL: nll or dft for sft; "
        f"{', '.join(PAIR_LOSSES)} for dpo; kto or apo_zero_unpaired for kto; null is TRL's "
        "default.",
    )
    beta: Float = Field(0.1, gt=0.0)
    """Strength of the regularization towards the reference model, the one at the start of the run
    (dpo, kto); for orpo, the weight of the odds ratio loss."""
    label_smoothing: Float = Field(0.0, ge=0.0, lt=1.0)
    """Label smoothing of dpo's losses robust and exo_pair: the assumed fraction of pairs whose
    chosen and rejected answers are swapped."""
    desirable_weight: Float = Field(1.0, ge=0.0)
    """Weight of desirable answers in kto's loss, which is averaged over all answers; 0 ignores
    them."""
    undesirable_weight: Float = Field(1.0, ge=0.0)
    """Weight of undesirable answers in kto's loss, which is averaged over all answers; 0 ignores
    them."""

    center_rewards_coefficient: Float = Field(0.0, ge=0.0)
    """Weight of the squared sum of a pair's rewards in reward's loss, which centers rewards at
    zero; 0.01 is usual, 0 disables it."""
    problem_type: Literal[
        "single_label_classification", "multi_label_classification", "regression"
    ] = "single_label_classification"
    """Loss of classification, as in transformers: cross-entropy for one label per row, binary
    cross-entropy for several, or the squared error for numbers."""
    labels: Labels = None
    """Names of classification's labels, in the order of their scores; null takes those of the
    training data."""
    class_weights: list[Float] | None = Field(None, min_length=2)
    """Weights of the labels in the cross-entropy, in their order; null for equal weights."""

    @field_validator("center_rewards_coefficient")
    @classmethod
    def _only_for_reward(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("objective", "reward") != "reward":
            raise ValueError("requires train.objective: reward")
        return value

    @field_validator("problem_type", "labels", "class_weights")
    @classmethod
    def _only_for_classification(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        is_default = value == cls.model_fields[info.field_name].default
        if not is_default and info.data.get("objective") not in (None, "classification"):
            raise ValueError("requires train.objective: classification")
        return value

    @field_validator("class_weights")
    @classmethod
    def _fit_the_labels(cls, value: list[float] | None, info: ValidationInfo) -> Any:
        if value is None:
            return value
        if info.data.get("problem_type") != "single_label_classification":
            raise ValueError("requires train.problem_type: single_label_classification")
        labels = info.data.get("labels")
        if labels is not None and len(labels) != len(value):
            raise ValueError(f"must have {len(labels)} weights, one per label, got {len(value)}")
        if min(value) < 0 or not any(value):
            raise ValueError("must not be negative, and one must be above 0")
        return value

    @field_validator("loss_type")
    @classmethod
    def _fits_the_objective(cls, value: str | None, info: ValidationInfo) -> str | None:
        objective = info.data.get("objective", "sft")
        allowed = LOSSES[objective]
        if value is not None and value not in allowed:
            names = " or ".join(allowed) if allowed else "null"
            if objective == "grpo":
                names += " (set grpo.loss_type)"
            raise ValueError(f"must be {names} with train.objective: {objective}")
        if objective == "sft" and value != "dft":
            return value
        unsupported = ["label_smoothing_factor", "z_loss_weight"]
        if objective != "sft":
            unsupported += ["neftune_noise_alpha", "router_aux_loss_coef"]
        for name in unsupported:
            if info.data.get(name):
                what = "loss_type: dft" if objective == "sft" else f"objective: {objective}"
                raise ValueError(
                    f"cannot be combined with train.{name}: train.{what} does not support it"
                )
        return value

    @field_validator("beta")
    @classmethod
    def _not_for_policies(cls, value: float, info: ValidationInfo) -> float:
        objective = info.data.get("objective")
        if objective in POLICY_OBJECTIVES and value != 0.1:
            raise ValueError(f"is not used by train.objective: {objective}: set grpo.beta")
        return value

    @field_validator("label_smoothing")
    @classmethod
    def _fits_the_loss(cls, value: float, info: ValidationInfo) -> float:
        loss = info.data.get("loss_type")
        if loss == "exo_pair" and value == 0:
            raise ValueError("must be above 0 with train.loss_type: exo_pair; 0.001 is usual")
        if loss == "robust" and value >= 0.5:
            raise ValueError("must be below 0.5 with train.loss_type: robust")
        if value > 0 and loss not in ("robust", "exo_pair"):
            raise ValueError(
                "requires train.objective: dpo with train.loss_type: robust or exo_pair; for sft, "
                "set train.label_smoothing_factor"
            )
        return value

    @field_validator("desirable_weight", "undesirable_weight")
    @classmethod
    def _only_for_kto(cls, value: float, info: ValidationInfo) -> float:
        if value != 1.0 and info.data.get("objective", "kto") != "kto":
            raise ValueError("requires train.objective: kto")
        if value == info.data.get("desirable_weight") == 0:
            raise ValueError("must be above 0 with train.desirable_weight: 0")
        return value

    @property
    def loss(self) -> str:
        """The loss: ``loss_type``, or the objective's default."""
        return self.loss_type or {"sft": "nll", "dpo": "sigmoid"}.get(
            self.objective, self.objective
        )

    @property
    def has_pairs(self) -> bool:
        """Whether a row of the data is a pair of a chosen and a rejected answer."""
        return self.objective in ("dpo", "orpo", "reward")

    @property
    def is_scored(self) -> bool:
        """Whether the model scores whole sequences: a reward model or classifier."""
        return self.objective in SCORED


# ---- learning rate schedules, with transformers' names -------------------------------------------

PLATEAU = "reduce_lr_on_plateau"
POLYNOMIAL_END = 1e-7
"""Default of ``lr_end``."""

_Check = Callable[[Any], str]
"""What is wrong with an argument's value, such as ``must be …``; empty if it is valid."""


def _number(
    low: float, high: float, *, integer: bool = False, over: bool = False, under: bool = False
) -> _Check:
    """A number from low to high; ``over`` excludes low, ``under`` excludes high."""

    def check(value: Any) -> str:
        is_number = isinstance(value, int if integer else int | float)
        in_range = is_number and not isinstance(value, bool) and low <= value <= high
        if in_range and not (over and value == low) and not (under and value == high):
            return ""
        kind = "an integer" if integer else "a number"
        if over or under:
            bounds = f"{'above' if over else 'of at least'} {low:,g} and "
            return f"must be {kind} {bounds}{'below' if under else 'at most'} {high:,g}"
        return f"must be {kind} from {low:,g} to {high:,g}"

    return check


def _one_of(*words: str) -> _Check:
    return lambda value: "" if value in words else f"must be one of {', '.join(words)}"


_RATE = _number(0.0, LEARNING_RATES[1])
_RATIO = _number(0.0, 1.0)
_STEPS = _number(0, STEPS, integer=True)
_CYCLES = _number(0.0, 1e6, over=True)
_CURVE = _one_of("linear", "cosine", "1-sqrt")
_MIN_LR: dict[str, _Check] = {"min_lr": _RATE, "min_lr_rate": _RATIO, "num_cycles": _CYCLES}

SCHEDULES: dict[str, dict[str, _Check]] = {
    "constant": {},
    "constant_with_warmup": {},
    "linear": {},
    "cosine": {"num_cycles": _CYCLES},
    "cosine_with_restarts": {"num_cycles": _number(1, 1e6, integer=True)},
    "cosine_with_min_lr": _MIN_LR,
    "cosine_warmup_with_min_lr": {**_MIN_LR, "warmup_lr_rate": _RATIO},
    "polynomial": {"lr_end": _RATE, "power": _number(0.0, 100.0)},
    "inverse_sqrt": {"timescale": _number(1, STEPS, integer=True)},
    "warmup_stable_decay": {
        "num_decay_steps": _STEPS,
        "num_stable_steps": _STEPS,
        "warmup_type": _CURVE,
        "decay_type": _CURVE,
        "min_lr_ratio": _RATIO,
        "num_cycles": _CYCLES,
    },
    PLATEAU: {
        "mode": _one_of("min", "max"),
        "factor": _number(0.0, 1.0, under=True),
        "patience": _STEPS,
        "threshold": _number(0.0, 1e9),
        "threshold_mode": _one_of("rel", "abs"),
        "cooldown": _STEPS,
        "min_lr": _RATE,
        "eps": _number(0.0, 1.0),
    },
}
"""The arguments of each schedule, for ``lr_scheduler_kwargs``."""


def check_schedule(name: str, arguments: Mapping[str, Any], learning_rate: float) -> None:
    """Raises ValueError for arguments that a schedule does not have, or that it requires."""
    known = SCHEDULES[name]
    for key, value in arguments.items():
        if key not in known:
            expected = f"expects {', '.join(known)}" if known else "has no arguments"
            raise ValueError(f"has {key!r}, but lr_scheduler_type: {name} {expected}")
        if problem := known[key](value):
            raise ValueError(f"has {key}, which {problem}")
    if "min_lr_rate" in known and ("min_lr" in arguments) == ("min_lr_rate" in arguments):
        raise ValueError(f"must have either min_lr or min_lr_rate for lr_scheduler_type: {name}")
    if name == "warmup_stable_decay" and "num_decay_steps" not in arguments:
        raise ValueError(f"must have num_decay_steps for lr_scheduler_type: {name}")
    for key in ("min_lr", "lr_end"):
        if key in known and arguments.get(key, 0.0) > learning_rate:
            raise ValueError(f"has {key}, which must not be above the learning_rate")
    if name == "polynomial" and arguments.get("lr_end", POLYNOMIAL_END) >= learning_rate:
        raise ValueError("must have an lr_end below the learning_rate")


# ---- the optimizer -------------------------------------------------------------------------------

LION_BETA2 = 0.99


def _default_beta2(optimizer: str) -> float:
    if OPTIMIZERS.get(optimizer.lower()) == "lion":
        return LION_BETA2
    default: float = OptimConfig.model_fields["adam_beta2"].default
    return default


def has_default_beta2(values: Mapping[str, Any]) -> bool:
    """Whether a file's section has its optimizer's default, as a run's config.yaml does.

    Nobody chose it then, so that another optimizer replaces it by its own.
    """
    return bool(values.get("adam_beta2") == _default_beta2(str(values.get("name"))))


class OptimConfig(Section):
    """The optimizer and its schedule."""

    name: OptimizerName = "adamw"
    """Optimizer: adamw; adamw_8bit, whose 8-bit moments (as in bitsandbytes; also adamw_bnb_8bit,
    paged_adamw_8bit) take a quarter of the memory; or lion, whose only moment takes half, for
    learning rates 5 to 10 times lower."""
    learning_rate: Float = Field(2e-4, gt=0.0, ge=LEARNING_RATES[0], le=LEARNING_RATES[1])
    """Peak learning rate."""
    lr_scheduler_type: ScheduleName = "cosine"
    """Learning rate schedule, as in transformers: constant, linear, cosine, constant_with_warmup,
    cosine_with_restarts, cosine_with_min_lr, cosine_warmup_with_min_lr, polynomial, inverse_sqrt,
    warmup_stable_decay or reduce_lr_on_plateau; constant and reduce_lr_on_plateau have no
    warmup."""
    lr_scheduler_kwargs: dict[str, Any] = Field({})
    """Arguments of the schedule, as in transformers, such as {min_lr_rate: 0.1} or
    {num_decay_steps: 200}."""
    warmup_ratio: Float = Field(0.03, ge=0.0, le=1.0)
    """Fraction of all steps used for linear warmup from zero."""
    warmup_steps: int = Field(0, ge=0, le=STEPS)
    """Number of linear warmup steps; 0 uses warmup_ratio."""
    loraplus_lr_ratio: Float = Field(1.0, gt=0.0)
    """Ratio of B's learning rate to A's (LoRA+); 16 is usual, 1 disables it."""
    weight_decay: Float = Field(0.0, ge=0.0)
    """Decoupled weight decay."""
    max_grad_norm: Float = Field(1.0, ge=0.0)
    """Maximum global norm of the gradient; 0 disables clipping."""
    adam_beta1: Float = Field(0.9, ge=0.0, lt=1.0, le=BETA)
    """Decay rate of the first moment; for lion, the weight of the moment in an update."""
    adam_beta2: Float = Field(0.999, ge=0.0, lt=1.0, le=BETA)
    """Decay rate of the second moment; for lion, of its only one, with a default of 0.99."""
    adam_epsilon: Float = Field(1e-8, gt=0.0)
    """Epsilon in the denominator of AdamW's update."""

    @model_validator(mode="before")
    @classmethod
    def _lion_defaults(cls, values: Any) -> Any:
        is_mapping = isinstance(values, Mapping)
        if is_mapping and OPTIMIZERS.get(str(values.get("name")).lower()) == "lion":
            return {"adam_beta2": LION_BETA2, **values}
        return values

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Pydantic's; another optimizer comes with its own default of ``adam_beta2``."""
        changes = dict(update or {})
        if "name" in changes and "adam_beta2" not in changes and not self.sets_beta2:
            changes["adam_beta2"] = _default_beta2(str(changes["name"]))
        return super().model_copy(update=changes, deep=deep)

    @property
    def sets_beta2(self) -> bool:
        """Whether ``adam_beta2`` was chosen, rather than the optimizer's default."""
        default = _default_beta2(self.name)
        is_set = "adam_beta2" in self.model_fields_set and default != LION_BETA2
        return is_set or self.adam_beta2 != default

    @field_validator("lr_scheduler_kwargs")
    @classmethod
    def _fits_the_schedule(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if {"lr_scheduler_type", "learning_rate"} <= info.data.keys():
            check_schedule(info.data["lr_scheduler_type"], value, info.data["learning_rate"])
        return value
