"""The settings of a run: every key, its type, its range, its meaning and its default.

Defaults are written in ``config/sections`` alone, a file for sections that belong together. Leaf
names are Hugging Face's, PEFT's and bitsandbytes' and mean what they mean there.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from qlora_wgpu.config.section import FREE_ON_RESUME, Section
from qlora_wgpu.config.sections.data import DataConfig
from qlora_wgpu.config.sections.model import LoraConfig, ModelConfig, QuantConfig
from qlora_wgpu.config.sections.run import (
    ClusterConfig,
    DeviceConfig,
    EvalConfig,
    LogConfig,
    OutputConfig,
)
from qlora_wgpu.config.sections.train import OptimConfig, TrainConfig
from qlora_wgpu.config.values import eval_metrics
from qlora_wgpu.config.yaml import dump_yaml
from qlora_wgpu.errors import ConfigError


class Config(Section):
    """All settings of a run."""

    model: Annotated[ModelConfig, Field(description="The base model.")]
    quant: QuantConfig = Field(
        default_factory=QuantConfig, description="Storage of the frozen base weights."
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="The trained adapter.")
    data: DataConfig = Field(default_factory=DataConfig, description="The data sets.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="The training loop.")
    optim: OptimConfig = Field(
        default_factory=OptimConfig, description="The optimizer and its schedule."
    )
    eval: Annotated[EvalConfig, FREE_ON_RESUME] = Field(
        default_factory=EvalConfig, description="Evaluation on held-out data."
    )
    log: Annotated[LogConfig, FREE_ON_RESUME] = Field(
        default_factory=LogConfig, description="Logging."
    )
    output: Annotated[OutputConfig, FREE_ON_RESUME] = Field(
        default_factory=OutputConfig, description="The run's folder."
    )
    device: Annotated[DeviceConfig, FREE_ON_RESUME] = Field(
        default_factory=DeviceConfig, description="The GPU."
    )
    cluster: Annotated[ClusterConfig, FREE_ON_RESUME] = Field(
        default_factory=ClusterConfig, description="Several GPUs and machines."
    )

    @field_validator("train")
    @classmethod
    def _goes_with_the_data(cls, value: TrainConfig, info: ValidationInfo) -> TrainConfig:
        data = info.data.get("data")
        if data is None or value.objective == "sft":
            return value
        what = f"has the objective {value.objective}"
        if data.has_weights:
            raise ValueError(
                f"{what} beside a column of weights in data.columns, which belong to rows that "
                "are learnt by themselves: leave that out"
            )
        if data.train_on in ("assistant", "all") or any(
            part.format != "auto" for part in data.parts()
        ):
            raise ValueError(
                f"{what}, whose rows are told by their keys and whose answers alone are compared: "
                "leave data.format and data.train_on at auto"
            )
        return value

    @field_validator("eval")
    @classmethod
    def _is_measured(cls, value: EvalConfig, info: ValidationInfo) -> EvalConfig:
        train = info.data.get("train")
        if train is None:
            return value
        known = eval_metrics(train.objective, train.loss_type)
        if value.metric_for_best_model not in known:
            raise ValueError(
                f"has metric_for_best_model: {value.metric_for_best_model}, but evaluations with "
                f"train.objective: {train.objective} give {', '.join(known)}"
            )
        return value

    @property
    def rows_at_once(self) -> int:
        """Rows of a micro-batch as it is computed: of a pair each answer has one, unless packed."""
        pairs = self.train.has_pairs and not self.data.packing
        return self.train.per_device_train_batch_size * (2 if pairs else 1)

    def require_train(self) -> DataConfig:
        """The ``data`` section, which names training data.

        Raises:
            ConfigError: If neither ``data.train`` nor ``data.sources`` is set.
        """
        if self.data.train is None and self.data.sources is None:
            raise ConfigError(
                "data.train is required for training but is not set: name a file, a folder or a "
                "data set of the Hugging Face Hub there, or several in data.sources"
            )
        return self.data

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
    return FREE_ON_RESUME in field.metadata


def sections() -> dict[str, list[str]]:
    """The leaf names of every section."""
    result = {}
    for name, field in Config.model_fields.items():
        assert field.annotation is not None
        result[name] = list(field.annotation.model_fields)
    return result
