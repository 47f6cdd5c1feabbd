"""The sections of evaluation, logs, the run's folder, the GPU and the cluster."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from qlora_wgpu.config.section import Section, with_new_names
from qlora_wgpu.config.values import (
    LOSS,
    AutoOrBool,
    EvalSteps,
    FileName,
    Float,
    GpuName,
    MemorySize,
    MetricName,
    PositiveInt,
    SampleSteps,
    Scheduler,
    Text,
    Workers,
    parse_bytes,
)
from qlora_wgpu.errors import install_command


class EvalConfig(Section):
    """Evaluation on held-out data."""

    eval_steps: EvalSteps = 50
    """Steps between evaluations, or a fraction of the run below 1; 0 evaluates only at the end."""
    load_best_model_at_end: bool = False
    """Whether the adapter with the best evaluation metric becomes the final one."""
    metric_for_best_model: MetricName = LOSS
    """Evaluation metric for the best adapter, early stopping and reduce_lr_on_plateau: loss,
    mean_token_accuracy or, with dpo, orpo and kto, any of their metrics in the log, such as
    rewards/margins or rewards/accuracies."""
    greater_is_better: bool | None = None
    """Whether a higher metric is better; null is transformers' default, true unless the metric's
    name ends in loss."""
    early_stopping_patience: PositiveInt | None = None
    """Number of consecutive evaluations without improvement after which the run stops; null
    disables early stopping."""
    early_stopping_threshold: Float = Field(0.0, ge=0.0)
    """Minimum change of the metric that counts as an improvement for early stopping."""
    sample_prompts: list[Text] = Field([])
    """Prompts (for text data, beginnings of text) to generate from before and after training; if
    empty, some are taken from the data."""
    sample_steps: SampleSteps = 0
    """Steps between generations during training, a fraction of the run below 1, or eval for every
    evaluation; 0 generates only before and after training."""
    sample_max_new_tokens: PositiveInt | None = None
    """Maximum number of tokens to generate per prompt; null is 64, or the length of the data's own
    answer."""

    @field_validator("greater_is_better")
    @classmethod
    def _fits_the_metric(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("metric_for_best_model") == LOSS:
            raise ValueError(
                "must not be true with eval.metric_for_best_model: loss, where lower is better"
            )
        return value

    @property
    def more_is_better(self) -> bool:
        """Whether a higher ``metric_for_best_model`` is better."""
        if self.greater_is_better is None:
            return not self.metric_for_best_model.endswith((LOSS, "mae"))
        return self.greater_is_better

    @property
    def aim(self) -> str:
        """The criterion of the best adapter, such as ``highest rewards/margins``."""
        return f"{'highest' if self.more_is_better else 'lowest'} {self.metric_for_best_model}"


class LogConfig(Section):
    """Logging."""

    logging_steps: PositiveInt = 1
    """Steps between rows of metrics.jsonl."""
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field([])
    """Services that also get the rows of metrics.jsonl; each needs the extra of the same name."""


class OutputConfig(Section):
    """The run's folder."""

    dir: FileName = "runs/first"
    """Folder of the run (output_dir in transformers)."""
    save_steps: PositiveInt = 50
    """Steps between checkpoints."""
    save_total_limit: PositiveInt | None = 2
    """Maximum number of checkpoints to keep, the newest ones; null keeps all."""


class ClusterConfig(Section):
    """Training on several GPUs and machines, through Dask distributed."""

    scheduler: Scheduler = Field(
        None,
        description="Where the workers run: null for this process only, local for processes on "
        "this machine, or the address of a Dask scheduler, tls://HOST:PORT "
        f"({install_command('cluster')}).",
    )
    workers: Workers = "auto"
    """Number of workers to start (local) or to wait for before training; auto starts one per GPU of
    this machine, or takes those that are connected, at least one."""
    division: Literal["measured", "fixed"] = "measured"
    """How micro-batches are assigned to workers: to whichever is free (measured), or round-robin by
    name (fixed), so that reruns on different GPUs are bit-identical."""
    patience: float = Field(600.0, gt=0)
    """Seconds without progress, such as without any worker, after which the run saves a checkpoint
    and ends."""
    certificates: Text | None = None
    """Folder with ca.pem, cert.pem and key.pem for tls://; null uses Dask's own configuration."""
    allow_plain_tcp: bool = False
    """Whether a tcp:// scheduler on another machine is allowed, although anyone on the network
    could then run code on all machines."""


class DeviceConfig(Section):
    """The GPU."""

    gpu: GpuName = "auto"
    """GPU to use: auto, or an index or part of a name from doctor's list."""
    backend: Literal["auto", "wgpu", "dawn"] = Field(
        "auto",
        description=f"WebGPU implementation: wgpu, or dawn ({install_command('dawn')}), which "
        "supports matrix units and is faster on software GPUs of Mesa 25 or later; auto uses dawn "
        "if it is installed and has one of these advantages.",
    )
    memory: MemorySize = "auto"
    """GPU memory for training: a size such as 8GiB or 8GB, or auto for what the driver reports as
    free; what does not fit is offloaded to host memory, which changes the speed but not the
    result."""
    keep_dequantized: AutoOrBool = "auto"
    """Whether dequantized copies of the weights are kept on the device, which is faster,
    bit-identical and takes 2 bytes per weight (4 with train.compute_dtype: float32); auto does so
    on a software GPU if the run takes at most a third of the machine's memory and device.memory has
    room."""
    tune: Literal["auto", "always", "never"] = "auto"
    """Whether kernel tilings are autotuned before training, once per GPU and model shape; auto does
    so if the run is long enough to benefit."""
    dispatches_per_submit: int = Field(100, ge=1)
    """Maximum number of dispatches per submission to the driver; when decoding on a software GPU,
    submissions start with this number and double."""
    submit_milliseconds: float = Field(100.0, gt=0)
    """Maximum duration of a submission to the driver in milliseconds, as measured in the first step
    (unlimited on a software GPU); lower it if a desktop system resets a slow GPU."""
    timeout: float | None = Field(None, gt=0)
    """Seconds without a response after which the driver counts as hung; null is 1800, 120 on Metal,
    or no limit on a software GPU."""

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
        warnings.warn("device.adapter was renamed to device.gpu", DeprecationWarning, stacklevel=2)
        return self.gpu
