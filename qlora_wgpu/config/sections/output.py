"""The sections of what a run measures, tells and leaves."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qlora_wgpu.config.section import Section
from qlora_wgpu.config.values import EvalSteps, Float, PositiveInt, SampleSteps, Text


class EvalConfig(Section):
    """Evaluation on held-out data."""

    eval_steps: EvalSteps = Field(
        50,
        description="Steps between evaluations, or a fraction of the whole run below 1; 0 for "
        "the end only.",
    )
    load_best_model_at_end: bool = Field(
        False,
        description="Whether the adapter with the lowest held-out loss becomes the final one.",
    )
    early_stopping_patience: PositiveInt | None = Field(
        None,
        description="Evaluations in a row without a lower held-out loss after which the run ends, "
        "or null for never.",
    )
    early_stopping_threshold: Float = Field(
        0.0, ge=0.0, description="Least fall of the held-out loss that counts as lower."
    )
    sample_prompts: list[Text] = Field(
        [],
        description="Prompts that the model answers (or texts that it continues, where it learns "
        "from text) before and after training; some of the data's where there is none.",
    )
    sample_steps: SampleSteps = Field(
        0,
        description="Steps between answers to them while training goes on, or a fraction of the "
        "whole run below 1, or eval for each evaluation; 0 for before and after alone.",
    )
    sample_max_new_tokens: PositiveInt | None = Field(
        None,
        description="Most tokens of such an answer; null is 64, and goes by the answer's length "
        "where the data has one.",
    )


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

    dir: Text = Field("runs/first", description="Folder of the run.")
    save_steps: PositiveInt = Field(50, description="Steps between checkpoints.")
    save_total_limit: PositiveInt | None = Field(
        2, description="Number of newest checkpoints that are kept, or null for all."
    )
