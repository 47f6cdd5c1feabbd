"""The sections of what a run measures, tells and leaves."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from qlora_wgpu.config.section import Section
from qlora_wgpu.config.values import (
    LOSS,
    EvalSteps,
    Figure,
    FileName,
    Float,
    PositiveInt,
    SampleSteps,
    Text,
)


class EvalConfig(Section):
    """Evaluation on held-out data."""

    eval_steps: EvalSteps = Field(
        50,
        description="Steps between evaluations, or a fraction of the whole run below 1; 0 for "
        "the end only.",
    )
    load_best_model_at_end: bool = Field(
        False,
        description="Whether the adapter with the best held-out figure becomes the final one.",
    )
    metric_for_best_model: Figure = Field(
        LOSS,
        description="Figure of evaluations that says which adapter is the best, when the run ends "
        "early and when reduce_lr_on_plateau lowers the rate: loss or mean_token_accuracy, or "
        "with dpo, orpo and kto any other of their figures in the log, such as rewards/margins or "
        "rewards/accuracies.",
    )
    greater_is_better: bool | None = Field(
        None,
        description="Whether more of that figure is better, or null for transformers' rule: it is "
        "unless the name ends in loss.",
    )
    early_stopping_patience: PositiveInt | None = Field(
        None,
        description="Evaluations in a row without a better figure after which the run ends, or "
        "null for never.",
    )
    early_stopping_threshold: Float = Field(
        0.0, ge=0.0, description="Least change of the figure that patience counts as better."
    )
    sample_prompts: list[Text] = Field(
        [],
        description="Prompts that the model answers (or texts that it continues, where it learns "
        "from text) before and after training; some of the data's where there is none.",
    )
    sample_steps: SampleSteps = Field(
        0,
        description="Steps between answers to them while training goes on, or a fraction of the "
        "whole run below 1, or eval for each evaluation; 0 for only before and after.",
    )
    sample_max_new_tokens: PositiveInt | None = Field(
        None,
        description="Most tokens of such an answer; null is 64, and goes by the answer's length "
        "where the data has one.",
    )

    @field_validator("greater_is_better")
    @classmethod
    def _of_the_figure(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("metric_for_best_model") == LOSS:
            raise ValueError(
                "cannot be true with eval.metric_for_best_model: loss, of which the least is best"
            )
        return value

    @property
    def more_is_better(self) -> bool:
        """Whether more of the figure that steers is better."""
        if self.greater_is_better is None:
            return not self.metric_for_best_model.endswith(LOSS)
        return self.greater_is_better

    @property
    def aim(self) -> str:
        """What the best adapter has, as ``highest rewards/margins``."""
        return f"{'highest' if self.more_is_better else 'lowest'} {self.metric_for_best_model}"


class LogConfig(Section):
    """Logging."""

    logging_steps: PositiveInt = Field(1, description="Steps between rows of metrics.jsonl.")
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        [],
        description="Services that get the rows of metrics.jsonl, too; each needs the extra of its "
        "name.",
    )


class OutputConfig(Section):
    """The run's folder."""

    dir: FileName = Field("runs/first", description="Folder of the run.")
    save_steps: PositiveInt = Field(50, description="Steps between checkpoints.")
    save_total_limit: PositiveInt | None = Field(
        2, description="Number of newest checkpoints that are kept, or null for all."
    )
