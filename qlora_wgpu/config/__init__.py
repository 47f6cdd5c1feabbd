"""Configuration: the schema with all defaults, and strict loading from YAML."""

from qlora_wgpu.config.loading import load_config
from qlora_wgpu.config.schema import Config
from qlora_wgpu.config.sections.data import DataConfig, SourceConfig
from qlora_wgpu.config.sections.model import LoraConfig, ModelConfig, QuantConfig
from qlora_wgpu.config.sections.run import (
    ClusterConfig,
    DeviceConfig,
    EvalConfig,
    LogConfig,
    OutputConfig,
)
from qlora_wgpu.config.sections.train import OptimConfig, TrainConfig
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
