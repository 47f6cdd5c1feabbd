"""QLoRA fine-tuning of language models on any GPU, through WebGPU."""

from qlora_wgpu.config import Config, LoraConfig, QuantConfig, load_config
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.families.family import register_family
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.runs import estimate, evaluate, open_adapter, train
from qlora_wgpu.training import Observer, Trainer, TrainResult
from qlora_wgpu.version import __version__

__all__ = [
    "Config",
    "LoraConfig",
    "Observer",
    "QLoRAError",
    "QLoRAModel",
    "QuantConfig",
    "TrainResult",
    "Trainer",
    "__version__",
    "estimate",
    "evaluate",
    "load_config",
    "open_adapter",
    "register_family",
    "train",
]
