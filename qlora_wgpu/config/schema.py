"""The settings of a run: every key, its type, its range, its meaning and its default.

This is the only place where defaults are written. Leaf names are Hugging Face's, PEFT's and
bitsandbytes' and mean what they mean there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from qlora_wgpu.config.byte_size import parse_bytes
from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES
from qlora_wgpu.config.renamed import with_new_names
from qlora_wgpu.config.section import Section
from qlora_wgpu.config.values import (
    ALL_LINEAR,
    Blocksize,
    EvalSplit,
    EvalSteps,
    Float,
    GpuName,
    MaxSteps,
    MemorySize,
    OptimizerName,
    Pattern,
    PositiveInt,
    PositiveNumber,
    Rank,
    RowFormat,
    Scheduler,
    TargetModules,
    Text,
    Workers,
)
from qlora_wgpu.config.yaml_file import dump_yaml
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.limits import BETA, LEARNING_RATES, STEPS, TOKENS_OF_A_ROW


class FreeOnResume:
    """Marks a key or a section that may be another one when a run goes on.

    It cannot change what is computed, or what it names is compared by its contents.
    """


_FREE_ON_RESUME = FreeOnResume()


class ModelConfig(Section):
    """The base model."""

    path: Annotated[Text, _FREE_ON_RESUME] = Field(
        description="Folder of the base model, or its name on the Hugging Face Hub; or a GGUF "
        "file, on the Hub as owner/name/FILE.gguf."
    )
    cache: Annotated[bool, _FREE_ON_RESUME] = Field(
        True,
        description="Whether layers that are quantized here, and wait outside the device, are kept "
        "on disk: they take no host memory, and the next run need not quantize them again.",
    )


class QuantConfig(Section):
    """Storage of the frozen base weights."""

    scheme: Literal["nf4", "none"] = Field(
        "nf4",
        description="Storage of the frozen linear weights: 4-bit NormalFloat, or none to leave "
        "them unquantized. A base that is quantized already keeps its own format with nf4.",
    )
    blocksize: Blocksize = Field(
        64, description="Number of weights that share one absmax scale, as in bitsandbytes."
    )
    double_quant: bool = Field(
        True, description="Whether the absmax scales are quantized to 8 bits themselves."
    )


class LoraConfig(Section):
    """The trained low-rank adapter, with PEFT's names."""

    r: Rank = Field(16, description="Rank of the adapter matrices.")
    lora_alpha: PositiveNumber = Field(
        32, description="Numerator of the scaling, which is lora_alpha / r."
    )
    lora_dropout: Float = Field(
        0.0, ge=0.0, lt=1.0, description="Probability of dropping an input of the adapter."
    )
    target_modules: TargetModules = Field(
        ALL_LINEAR,
        description="Names of the linear modules that get an adapter, a regular expression of "
        "whole names, or all-linear for every one but the output head and experts.",
    )
    use_rslora: bool = Field(
        False, description="Whether the scaling is lora_alpha / sqrt(r) (rank-stabilized LoRA)."
    )
    use_dora: bool = Field(
        False,
        description="Whether each output's magnitude is trained by itself (DoRA); needs "
        "lora_dropout 0.",
    )
    rank_pattern: dict[Pattern, Rank] = Field(
        {}, description="Ranks of modules that differ from r, by patterns of their names."
    )
    alpha_pattern: dict[Pattern, PositiveNumber] = Field(
        {},
        description="Values of lora_alpha for modules that differ, by patterns of their names.",
    )
    layers_to_transform: list[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        min_length=1,
        description="Numbers of the layers that get an adapter, or null for all.",
    )
    init_lora_weights: Literal["default", "gaussian"] = Field(
        "default",
        description="Initial values of A: uniform as PEFT's default, or normal with a standard "
        "deviation of 1 / r; B begins with zeros.",
    )
    init_from: Annotated[Text | None, _FREE_ON_RESUME] = Field(
        None, description="Folder of an adapter of the same shape to go on training, or null."
    )

    @property
    def scaling(self) -> float:
        """Factor of the adapter's product: alpha / r, or alpha / sqrt(r) (arXiv 2312.03732)."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class DataConfig(Section):
    """The data sets and how rows become tokens."""

    train: Annotated[Text | None, _FREE_ON_RESUME] = Field(
        None,
        description="Training data: a .jsonl, .json, .csv, .parquet or .txt file, a folder of "
        "them, or a data set of the Hugging Face Hub as owner/name:split (training needs one).",
    )
    eval: Annotated[Text | None, _FREE_ON_RESUME] = Field(
        None, description="Held-out data in the same formats, or null for no evaluation."
    )
    eval_split: EvalSplit = Field(
        None,
        description="Rows of data.train that are held out instead of data.eval: a share such as "
        "0.05 or a number, chosen by train.seed and the rows' contents; null for none.",
    )
    max_seq_length: int = Field(
        1024, ge=2, le=TOKENS_OF_A_ROW, description="Longest row in tokens."
    )
    format: RowFormat = Field(
        "auto",
        description="Format of the rows, by their keys: messages (also openai, chat_template), "
        "conversations (sharegpt), prompt/completion, instruction/output (alpaca) or text; auto "
        "goes by the keys of the first one.",
    )
    columns: dict[Text, Text] = Field(
        {},
        description="Names of the rows' own columns by the format's, where they differ, "
        "such as {prompt: question, completion: answer}.",
    )
    train_on: Literal["auto", "assistant", "last_turn", "completion", "all"] = Field(
        "auto",
        description="Tokens that are learnt: the assistant's turns of a chat or a row's answer "
        "(auto, assistant), the last turn alone (last_turn, completion), or everything (all; rows "
        "of text always).",
    )
    truncation: Literal["keep_start", "keep_end", "drop", "error"] = Field(
        "keep_start",
        description="Treatment of rows longer than max_seq_length: cut at the end, cut at the "
        "beginning, left out, or an error.",
    )
    packing: bool = Field(
        False,
        description="Whether several examples share a row of max_seq_length tokens; they do not "
        "see each other, and positions restart.",
    )
    group_by_length: bool = Field(
        True,
        description="Whether the rows of a step are cut into micro-batches by their length, which "
        "saves padding and changes nothing else.",
    )
    cache: Annotated[bool, _FREE_ON_RESUME] = Field(
        True, description="Whether prepared data is kept on disk for the next run."
    )
    chat_template: Annotated[Text | None, _FREE_ON_RESUME] = Field(
        None,
        description="Chat template used instead of the tokenizer's: a .jinja file, the template "
        f"itself, or a built-in name: {', '.join(BUILT_IN_CHAT_TEMPLATES)}.",
    )

    @field_validator("eval_split")
    @classmethod
    def _alone(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("eval") is not None:
            raise ValueError("cannot stand beside data.eval: keep one of the two")
        return value


class TrainConfig(Section):
    """The training loop."""

    num_train_epochs: Annotated[float, _FREE_ON_RESUME] = Field(
        1.0, gt=0.0, description="Number of passes over the training data; may be a fraction."
    )
    max_steps: Annotated[MaxSteps, _FREE_ON_RESUME] = Field(
        -1, description="Number of optimizer steps, which overrides num_train_epochs; -1 for none."
    )
    per_device_train_batch_size: PositiveInt = Field(1, description="Rows in a micro-batch.")
    gradient_accumulation_steps: PositiveInt = Field(
        16, description="Micro-batches whose gradients are summed for one optimizer step."
    )
    gradient_checkpointing: Annotated[bool, _FREE_ON_RESUME] = Field(
        True, description="Whether layers are recomputed in the backward pass to save memory."
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
        description="Share of each label that is spread over the whole vocabulary; the held-out "
        "loss stays without.",
    )
    z_loss_weight: Float = Field(
        0.0,
        ge=0.0,
        description="Weight of the squared logarithm of the softmax's normalizer, added to the "
        "loss in training; 1e-4 is usual, 0 turns it off.",
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


class OptimConfig(Section):
    """AdamW and its schedule."""

    name: OptimizerName = Field(
        "adamw",
        description="The optimizer: adamw, or adamw_8bit, whose moments take a quarter of the "
        "memory, in 8 bits as bitsandbytes' (also adamw_bnb_8bit, paged_adamw_8bit).",
    )
    learning_rate: Float = Field(
        2e-4, gt=0.0, ge=LEARNING_RATES[0], le=LEARNING_RATES[1], description="Peak learning rate."
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine", "constant_with_warmup"] = Field(
        "cosine",
        description="Shape of the learning rate after warm-up; constant has no warm-up at all.",
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
    weight_decay: Float = Field(0.0, ge=0.0, description="Decoupled weight decay of AdamW.")
    max_grad_norm: Float = Field(
        1.0, ge=0.0, description="Largest global norm of the gradient; 0 turns clipping off."
    )
    adam_beta1: Float = Field(
        0.9, ge=0.0, lt=1.0, le=BETA, description="Decay rate of the first moment."
    )
    adam_beta2: Float = Field(
        0.999, ge=0.0, lt=1.0, le=BETA, description="Decay rate of the second moment."
    )
    adam_epsilon: Float = Field(
        1e-8, gt=0.0, description="Term added to the denominator of the update."
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


class LogConfig(Section):
    """Logging."""

    logging_steps: PositiveInt = Field(1, description="Steps between rows of metrics.jsonl.")
    report_to: list[Literal["tensorboard", "wandb"]] = Field(
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


class DeviceConfig(Section):
    """The GPU."""

    gpu: GpuName = Field(
        "auto",
        description="The GPU to use, as doctor lists them: auto, its index or part of its name.",
    )
    backend: Literal["auto", "wgpu", "dawn"] = Field(
        "auto",
        description="WebGPU implementation: wgpu, or dawn (pip install 'qlora-wgpu[dawn]'), which "
        "reaches GPUs' matrix units and is faster on software GPUs of Mesa 25 or later; auto "
        "takes dawn where it is installed and can do either.",
    )
    memory: MemorySize = Field(
        "auto",
        description="Memory of the device that training may take: a size such as 8GiB or 8GB, or "
        "auto for what the driver says is free. What has no room waits in host memory, which "
        "changes the speed and nothing that is computed.",
    )
    tune: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether ways of cutting kernels are timed before training, once per GPU "
        "and model shape; auto does so where the run is long enough to gain by it.",
    )
    dispatches_per_submit: int = Field(
        100,
        ge=1,
        description="After how many dispatches work is handed to the driver at the latest.",
    )
    submit_milliseconds: float = Field(
        100.0,
        gt=0,
        description="After how much time of work it is handed to the driver, as measured in the "
        "first step: less where a desktop system resets a GPU that is slow to answer. A software "
        "GPU has no such limit.",
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


class ClusterConfig(Section):
    """Training on several GPUs and machines, through Dask distributed."""

    scheduler: Scheduler = Field(
        None,
        description="Where the workers are: null for this process alone, local for processes on "
        "this machine, or the address of a Dask scheduler, tls://HOST:PORT (pip install "
        "'qlora-wgpu[cluster]').",
    )
    workers: Workers = Field(
        "auto",
        description="Number of worker processes with local, else how many workers to wait for "
        "before training begins; auto is one for each GPU of this machine, else those that are "
        "there, at least one.",
    )
    division: Literal["measured", "fixed"] = Field(
        "measured",
        description="Which worker computes which micro-batch: the one that is expected to be done "
        "soonest (measured), or in turn by their names (fixed), so that a rerun on unlike GPUs "
        "has the same bits.",
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


class Config(Section):
    """All settings of a run."""

    model: ModelConfig = Field(description="The base model.")
    quant: QuantConfig = Field(
        default_factory=QuantConfig, description="Storage of the frozen base weights."
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="The trained adapter.")
    data: DataConfig = Field(default_factory=DataConfig, description="The data sets.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="The training loop.")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="AdamW and its schedule.")
    eval: Annotated[EvalConfig, _FREE_ON_RESUME] = Field(
        default_factory=EvalConfig, description="Evaluation on held-out data."
    )
    log: Annotated[LogConfig, _FREE_ON_RESUME] = Field(
        default_factory=LogConfig, description="Logging."
    )
    output: Annotated[OutputConfig, _FREE_ON_RESUME] = Field(
        default_factory=OutputConfig, description="The run's folder."
    )
    device: Annotated[DeviceConfig, _FREE_ON_RESUME] = Field(
        default_factory=DeviceConfig, description="The GPU."
    )
    cluster: Annotated[ClusterConfig, _FREE_ON_RESUME] = Field(
        default_factory=ClusterConfig, description="Several GPUs and machines."
    )

    def require_train_path(self) -> str:
        """The training file.

        Raises:
            ConfigError: If ``data.train`` is not set.
        """
        if self.data.train is None:
            raise ConfigError(
                "data.train is required for training but is not set: "
                "name a file, a folder or a data set of the Hugging Face Hub there"
            )
        return self.data.train

    def fixed_settings(self) -> dict[str, Any]:
        """The settings that a run keeps when it goes on, by names such as ``lora.r``."""
        return {
            f"{section}.{key}": getattr(values, key)
            for section, values in self
            if not _is_free(type(self).model_fields[section])
            for key, field in type(values).model_fields.items()
            if not _is_free(field)
        }

    def to_yaml(self) -> str:
        """The whole configuration as YAML that ``load_config`` reads back to an equal one."""
        return dump_yaml(self.model_dump())


def _is_free(field: FieldInfo) -> bool:
    return _FREE_ON_RESUME in field.metadata


def sections() -> dict[str, list[str]]:
    """The leaf names of every section."""
    result = {}
    for name, field in Config.model_fields.items():
        assert field.annotation is not None
        result[name] = list(field.annotation.model_fields)
    return result
