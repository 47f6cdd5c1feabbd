"""The sections of what a run measures, tells and leaves, and of the machines that it takes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from qlora_wgpu.config.problems import with_new_names
from qlora_wgpu.config.section import Section
from qlora_wgpu.config.values import (
    LOSS,
    AutoOrBool,
    EvalSteps,
    Figure,
    FileName,
    Float,
    GpuName,
    MemorySize,
    PositiveInt,
    SampleSteps,
    Scheduler,
    Text,
    Workers,
    parse_bytes,
)
from qlora_wgpu.extras import install_command


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


class ClusterConfig(Section):
    """Training on several GPUs and machines, through Dask distributed."""

    scheduler: Scheduler = Field(
        None,
        description="Where the workers are: null for this process alone, local for processes on "
        "this machine, or the address of a Dask scheduler, tls://HOST:PORT "
        f"({install_command('cluster')}).",
    )
    workers: Workers = Field(
        "auto",
        description="Number of worker processes with local, else how many workers to wait for "
        "before training begins; auto is one for each GPU of this machine, else those that are "
        "there, at least one.",
    )
    division: Literal["measured", "fixed"] = Field(
        "measured",
        description="Which worker computes which micro-batch: whoever is free takes the next one "
        "(measured), or in turn by their names (fixed), so that a rerun on unlike GPUs has the "
        "same bits.",
    )
    patience: float = Field(
        600.0,
        gt=0,
        description="Seconds without any progress, as when no worker is left, after which the run "
        "ends with its state saved.",
    )
    certificates: Text | None = Field(
        None,
        description="Folder with ca.pem, cert.pem and key.pem for tls://, or null for what Dask's "
        "own configuration says.",
    )
    allow_plain_tcp: bool = Field(
        False,
        description="Whether a tcp:// scheduler on another machine is used, although anyone on "
        "the network could then run code on all machines.",
    )


class DeviceConfig(Section):
    """The GPU."""

    gpu: GpuName = Field(
        "auto",
        description="The GPU to use, as doctor lists them: auto, its index or part of its name.",
    )
    backend: Literal["auto", "wgpu", "dawn"] = Field(
        "auto",
        description=f"WebGPU implementation: wgpu, or dawn ({install_command('dawn')}), which "
        "reaches GPUs' matrix units and is faster on software GPUs of Mesa 25 or later; auto "
        "takes dawn where it is installed and can do either.",
    )
    memory: MemorySize = Field(
        "auto",
        description="Memory of the device that training may take: a size such as 8GiB or 8GB, or "
        "auto for what the driver says is free. What has no room waits in host memory, which "
        "changes the speed and nothing that is computed.",
    )
    keep_dequantized: AutoOrBool = Field(
        "auto",
        description="Whether quantized weights are kept dequantized on the device beside their "
        "codes, so that no step dequantizes them anew: faster, for 2 bytes a weight (4 with "
        "train.compute_dtype float32), and the same bits. auto does so on a software GPU where "
        "the run takes a third of the machine's memory at most, and where device.memory leaves "
        "room for it.",
    )
    tune: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether ways of cutting kernels are timed before training, once per GPU "
        "and model shape; auto does so where the run is long enough to gain by it.",
    )
    dispatches_per_submit: int = Field(
        100,
        ge=1,
        description="Most dispatches that are handed to the driver at once. On a software GPU, "
        "new tokens that are computed ahead are handed over in pieces that double.",
    )
    submit_milliseconds: float = Field(
        100.0,
        gt=0,
        description="Most work, in milliseconds, that is handed to the driver at once, as "
        "measured in the first step: take less if a desktop system resets a GPU that is slow to "
        "answer. A software GPU has no such limit.",
    )
    timeout: float | None = Field(
        None,
        gt=0,
        description="Seconds after which a driver that does not answer counts as hung; null is "
        "1800, and no limit for a software GPU.",
    )

    @model_validator(mode="before")
    @classmethod
    def _new_names(cls, values: Any) -> Any:
        return with_new_names("device", values) if isinstance(values, Mapping) else values

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of ``memory``; None for auto."""
        if self.memory == "auto":
            return None
        return parse_bytes(self.memory) if isinstance(self.memory, str) else self.memory

    @property
    def adapter(self) -> str:
        """The former name of ``gpu``."""
        warnings.warn("device.adapter is now device.gpu", DeprecationWarning, stacklevel=2)
        return self.gpu
