"""All settings of a run; ``config/sections`` has every key, its type, range, meaning and default.

Keys are named as in Hugging Face's libraries, PEFT and bitsandbytes, and mean the same.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from qlora_wgpu.config.section import FREE_ON_RESUME, Section
from qlora_wgpu.config.sections.data import DataConfig
from qlora_wgpu.config.sections.grpo import POLICY_OBJECTIVES, GRPOConfig
from qlora_wgpu.config.sections.model import LoraConfig, ModelConfig, QuantConfig
from qlora_wgpu.config.sections.run import (
    ClusterConfig,
    DeviceConfig,
    EvalConfig,
    LogConfig,
    OutputConfig,
)
from qlora_wgpu.config.sections.train import OptimConfig, TrainConfig
from qlora_wgpu.config.values import LOSS, REWARD, eval_metrics
from qlora_wgpu.config.yaml import dump_yaml
from qlora_wgpu.errors import ConfigError


class Config(Section):
    """All settings of a run."""

    model: ModelConfig
    quant: QuantConfig = Field(default_factory=QuantConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    eval: Annotated[EvalConfig, FREE_ON_RESUME] = Field(default_factory=EvalConfig)
    log: Annotated[LogConfig, FREE_ON_RESUME] = Field(default_factory=LogConfig)
    output: Annotated[OutputConfig, FREE_ON_RESUME] = Field(default_factory=OutputConfig)
    device: Annotated[DeviceConfig, FREE_ON_RESUME] = Field(default_factory=DeviceConfig)
    cluster: Annotated[ClusterConfig, FREE_ON_RESUME] = Field(default_factory=ClusterConfig)

    @field_validator("train")
    @classmethod
    def _fits_the_data(cls, value: TrainConfig, info: ValidationInfo) -> TrainConfig:
        data = info.data.get("data")
        if data is None or value.objective == "sft":
            return value
        if data.has_weights:
            raise ValueError(
                f"has objective: {value.objective}, which does not support weights of rows: remove "
                "weight from data.columns"
            )
        if value.is_scored and data.packing:
            raise ValueError(
                f"has objective: {value.objective}, which does not support data.packing: set it to "
                "false"
            )
        formats = {part.format for part in data.parts()}
        if value.objective == "classification":
            formats = {"auto"}
        if data.train_on in ("assistant", "all") or formats != {"auto"}:
            raise ValueError(
                f"has objective: {value.objective}, which detects rows by their keys and compares "
                "only answers: leave data.format and data.train_on at auto"
            )
        if value.objective in POLICY_OBJECTIVES and data.packing:
            raise ValueError(
                f"has objective: {value.objective}, which does not support data.packing: set it to "
                "false"
            )
        return value

    @field_validator("grpo")
    @classmethod
    def _fits_the_objective(cls, value: GRPOConfig, info: ValidationInfo) -> GRPOConfig:
        train = info.data.get("train")
        if train is None:
            return value
        if (unused := value.unused_by(train.objective)) is not None:
            other = "rloo" if train.objective == "grpo" else "grpo"
            raise ValueError(
                f"has {unused}, which train.objective: {train.objective} does not use: remove it, "
                f"or set train.objective: {other}"
            )
        if train.objective in POLICY_OBJECTIVES:
            value.check_sizes(
                train.objective, train.per_device_train_batch_size,
                train.gradient_accumulation_steps,
            )  # fmt: skip
        return value

    @field_validator("eval")
    @classmethod
    def _has_the_metric(cls, value: EvalConfig, info: ValidationInfo) -> EvalConfig:
        train = info.data.get("train")
        if train is None:
            return value
        known = eval_metrics(train.objective, train.loss_type, train.problem_type)
        name = value.metric_for_best_model
        if train.objective in POLICY_OBJECTIVES:
            if name == LOSS and "metric_for_best_model" not in value.model_fields_set:
                return value.model_copy(update={"metric_for_best_model": REWARD})
            if name.startswith("rewards/") and name.endswith("/mean"):
                return value
        if value.metric_for_best_model not in known:
            raise ValueError(
                f"has metric_for_best_model: {value.metric_for_best_model}, but the metrics of "
                f"train.objective: {train.objective} are {', '.join(known)}"
            )
        return value

    @property
    def rows_at_once(self) -> int:
        """Sequences of a micro-batch: two for each pair of answers, unless they are packed."""
        pairs = self.train.has_pairs and not self.data.packing
        return self.train.per_device_train_batch_size * (2 if pairs else 1)

    def require_train(self) -> DataConfig:
        """The ``data`` section, which names training data.

        Raises:
            ConfigError: If neither ``data.train`` nor ``data.sources`` is set.
        """
        if self.data.train is None and self.data.sources is None:
            raise ConfigError(
                "data.train is required for training: set it to a file, a folder or a data set of "
                "the Hugging Face Hub, or list several in data.sources"
            )
        return self.data

    def fixed_settings(self) -> dict[str, Any]:
        """The settings that must not change when a run is resumed, by dotted key."""
        fixed = {
            f"{section}.{key}": getattr(values, key)
            for section, values in self
            if not _is_free(type(self).model_fields[section])
            for key, field in type(values).model_fields.items()
            if not _is_free(field)
        }
        return {**fixed, "grpo.reward_funcs": self.grpo.functions_by_name}

    def to_yaml(self) -> str:
        """The configuration as YAML, which ``load_config`` reads back unchanged."""
        return dump_yaml(self.model_dump())


def _is_free(field: FieldInfo) -> bool:
    return FREE_ON_RESUME in field.metadata


def sections() -> dict[str, list[str]]:
    """The keys of every section."""
    result = {}
    for name, field in Config.model_fields.items():
        assert field.annotation is not None
        result[name] = list(field.annotation.model_fields)
    return result
