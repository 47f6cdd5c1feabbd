"""Configuration: the schema with all defaults, and strict loading from YAML."""

from qlora_wgpu.config.loading import load_config
from qlora_wgpu.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    DeviceConfig,
    EvalConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    OutputConfig,
    QuantConfig,
    SourceConfig,
    TrainConfig,
)
from qlora_wgpu.config.values import ALL_LINEAR

__all__ = [
    "ALL_LINEAR",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DeviceConfig",
    "EvalConfig",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "OutputConfig",
    "QuantConfig",
    "SourceConfig",
    "TrainConfig",
    "load_config",
]
