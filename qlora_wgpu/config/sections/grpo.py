"""The section of objectives whose completions are sampled and scored: GRPO and RLOO."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from qlora_wgpu.config.section import Section
from qlora_wgpu.config.values import Float, PositiveInt, Text

POLICY_OBJECTIVES = ("grpo", "rloo")
"""The values of ``train.objective`` that use this section."""
_ONLY_GRPO = (
    "delta", "loss_type", "importance_sampling_level", "scale_rewards", "use_bias_correction_kl",
    "multi_objective_aggregation", "sapo_temperature_pos", "sapo_temperature_neg",
    "top_entropy_quantile",
)  # fmt: skip
_ONLY_RLOO = ("normalize_advantages", "reward_clip_range")


def _with_options(function: Any) -> Any:
    """The entry of ``reward_funcs`` with the path of a reward model as an option."""
    if function == "reward_model":
        raise ValueError("must have the path of a reward model, such as {reward_model: PATH}")
    if not isinstance(function, dict):
        return function
    ((name, options),) = function.items()
    if not isinstance(options, str):
        return function
    if name != "reward_model":
        raise ValueError(f"must have options for {name}, such as {{regex: {{pattern: a}}}}")
    return {name: {"path": options}}


def reward_model_in(function: Any) -> dict[str, Any] | None:
    """The options of an entry of ``reward_funcs`` that is a reward model with a path; else None."""
    options = function.get("reward_model") if isinstance(function, dict) else None
    return options if isinstance(options, dict) and isinstance(options.get("path"), str) else None


class GRPOConfig(Section):
    """Sampling, rewards and loss of train.objective: grpo and rloo, by TRL's names."""

    reward_funcs: list[Text | dict[Text, Text | dict[Text, Any]]] = Field([])
    """Reward functions: exact_match, contains, regex, numeric, length, format, json,
    json_schema or math_verify, those with arguments as mappings such as {regex: {pattern: '^Yes'}},
    a trained reward model as {reward_model: PATH}, or functions of your own as FILE.py:FUNCTION
    (train --allow-code)."""
    reward_weights: list[Float] | None = Field(None)
    """Weight of each reward function; null weights all by 1."""
    reward_timeout: float = Field(60.0, gt=0)
    """Maximum duration of a call of a reward function of your own, in seconds."""
    num_generations: int | None = Field(None, ge=2)
    """Completions per prompt; null is TRL's default, 8 for grpo and 2 for rloo. A micro-batch has
    train.per_device_train_batch_size completions."""
    num_generations_eval: PositiveInt | None = None
    """Completions per held-out prompt; null uses num_generations."""
    max_completion_length: PositiveInt = 512
    """Maximum number of tokens of a completion; data.max_seq_length limits the prompt."""
    steps_per_generation: PositiveInt | None = None
    """Micro-batches of completions that are sampled at once, a multiple of
    train.gradient_accumulation_steps; null samples for one optimizer step."""
    num_iterations: PositiveInt = 1
    """Number of times that the sampled completions are trained on."""
    temperature: Float = Field(1.0, gt=0.0)
    """Sampling temperature, by which the logits are also divided in training."""
    top_p: Float = Field(1.0, gt=0.0, le=1.0)
    """Probability of the smallest set of most likely tokens to sample from."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens to sample from; 0 for all."""
    min_p: Float | None = Field(None, ge=0.0, le=1.0)
    """Minimum probability of a token, relative to the most likely one; null for none."""
    repetition_penalty: Float = Field(1.0, gt=0.0)
    """Penalty of tokens that have occurred; 1 for none."""
    beta: Float | None = Field(None, ge=0.0)
    """Weight of the KL divergence from the reference model, which is the model without the adapter;
    0 needs no reference model, null is TRL's default, 0 for grpo and 0.05 for rloo."""
    epsilon: Float = Field(0.2, ge=0.0)
    """How far below 1 the ratio of probabilities may be before it is clipped."""
    epsilon_high: Float | None = Field(None, ge=0.0)
    """How far above 1 the ratio may be, for cispo the maximum of the ratio; null uses epsilon."""
    delta: Float | None = Field(None, gt=0.0)
    """Maximum of the ratio where the advantage is negative (two-sided clipping); null for none."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo"] = "dapo"
    """How the loss is computed and averaged over tokens, for grpo."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Whether each token has a ratio, or each completion (GSPO)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation that advantages are divided by: that of a prompt's completions, of all
    completions that are sampled at once, or none."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """Whether advantages are computed from the sum of the rewards, or per reward function and then
    summed (GDPO)."""
    mask_truncated_completions: bool = False
    """Whether completions that reach max_completion_length are excluded from the loss."""
    use_bias_correction_kl: bool = True
    """Whether the KL divergence is multiplied by the ratio."""
    sapo_temperature_pos: Float = Field(1.0, gt=0.0)
    """Temperature of loss_type: sapo for positive advantages."""
    sapo_temperature_neg: Float = Field(1.05, gt=0.0)
    """Temperature of loss_type: sapo for other advantages."""
    top_entropy_quantile: Float = Field(1.0, ge=0.0, le=1.0)
    """Share of a micro-batch's tokens, those with the highest entropies, that have a policy loss; 1
    for all, 0 for the highest one. All tokens have a KL divergence."""
    normalize_advantages: bool = False
    """Whether rloo's advantages are normalized over all completions that are sampled at once."""
    reward_clip_range: list[Float] | None = Field(None, min_length=2, max_length=2)
    """Minimum and maximum of rloo's rewards; null for none."""
    log_completions: bool = False
    """Whether all completions are written to samples.jsonl, instead of those of one prompt per
    generation."""

    @field_validator("reward_funcs")
    @classmethod
    def _one_function_each(cls, value: list[Any]) -> list[Any]:
        for each in value:
            if isinstance(each, dict) and len(each) != 1:
                raise ValueError("must have one function per entry, such as {regex: {pattern: a}}")
        return [_with_options(each) for each in value]

    @field_validator("reward_weights")
    @classmethod
    def _one_each(cls, value: list[float] | None, info: ValidationInfo) -> list[float] | None:
        functions = info.data.get("reward_funcs", [])
        if value is not None and len(value) < len(functions):
            raise ValueError(f"must have a weight for each of the {len(functions)} reward_funcs")
        return value

    @field_validator("reward_clip_range")
    @classmethod
    def _ascends(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError("must be a minimum and a larger maximum")
        return value

    @property
    def functions_by_name(self) -> list[Any]:
        """``reward_funcs`` without the folders of models and files, which may move."""
        made: list[Any] = []
        for each in self.reward_funcs:
            if (model := reward_model_in(each)) is not None:
                made.append({"reward_model": {**model, "path": Path(model["path"]).name}})
            elif isinstance(each, str) and each.rpartition(":")[0].endswith(".py"):
                made.append(Path(each).name)
            else:
                made.append(each)
        return made

    def group_size(self, objective: str) -> int:
        """Completions per prompt: ``num_generations``, or the objective's default."""
        return self.num_generations or {"grpo": 8, "rloo": 2}[objective]

    def kl_weight(self, objective: str) -> float:
        """``beta``, or the objective's default."""
        return {"grpo": 0.0, "rloo": 0.05}[objective] if self.beta is None else self.beta

    def generation_batch_size(self, batch_size: int, accumulation: int) -> int:
        """Completions that are sampled at once."""
        return batch_size * (self.steps_per_generation or accumulation)

    def check_sizes(self, objective: str, batch_size: int, accumulation: int) -> None:
        """Raises a ValueError unless completions fill groups, and generations fill steps."""
        blocks, group = self.steps_per_generation or accumulation, self.group_size(objective)
        if blocks % accumulation:
            raise ValueError(
                f"has steps_per_generation: {blocks}, which must be a multiple of "
                f"train.gradient_accumulation_steps ({accumulation})"
            )
        if (size := self.generation_batch_size(batch_size, accumulation)) % group:
            raise ValueError(
                f"has {group} completions per prompt (num_generations), but {size} "
                "are sampled at once (train.per_device_train_batch_size times steps_per_generation "
                "or train.gradient_accumulation_steps): make that a multiple"
            )

    def unused_by(self, objective: str) -> str | None:
        """A setting that differs from its default, but that the objective does not use."""
        others: tuple[str, ...] = _ONLY_RLOO if objective == "grpo" else _ONLY_GRPO
        if objective not in POLICY_OBJECTIVES:
            others = tuple(type(self).model_fields)
        fields = type(self).model_fields
        return next((n for n in others if getattr(self, n) != fields[n].default), None)
