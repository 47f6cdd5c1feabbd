"""QLoRA fine-tuning of language models on any GPU, through WebGPU."""

from qlora_wgpu.config import Config, LoraConfig, QuantConfig, load_config
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.families.family import register_family
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.training import Trainer, TrainResult
from qlora_wgpu.version import __version__

__all__ = [
    "Config",
    "LoraConfig",
    "QLoRAError",
    "QLoRAModel",
    "QuantConfig",
    "TrainResult",
    "Trainer",
    "__version__",
    "load_config",
    "register_family",
]
