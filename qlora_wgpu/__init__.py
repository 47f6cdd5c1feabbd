"""QLoRA fine-tuning of language models on any GPU, through WebGPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qlora_wgpu.api import export, init, merge, push, quantize, train
    from qlora_wgpu.config import Config, LoraConfig, QuantConfig, load_config
    from qlora_wgpu.data import Dataset, Tokenizer, load_dataset
    from qlora_wgpu.errors import QLoRAError
    from qlora_wgpu.families.family import register_family
    from qlora_wgpu.generation import QLoRAModel
    from qlora_wgpu.generation.generate import generate
    from qlora_wgpu.grpo.trainer import Trainer
    from qlora_wgpu.runs import estimate, evaluate, open_adapter
    from qlora_wgpu.runs.reporting import RunHistory, read_log
    from qlora_wgpu.training import Step, TrainerCallback, TrainResult
    from qlora_wgpu.version import __version__

__all__ = [
    "Config",
    "Dataset",
    "LoraConfig",
    "QLoRAError",
    "QLoRAModel",
    "QuantConfig",
    "RunHistory",
    "Step",
    "Tokenizer",
    "TrainResult",
    "Trainer",
    "TrainerCallback",
    "__version__",
    "estimate",
    "evaluate",
    "export",
    "generate",
    "init",
    "load_config",
    "load_dataset",
    "merge",
    "open_adapter",
    "push",
    "quantize",
    "read_log",
    "register_family",
    "train",
]

# Imported on first use: a supervising process needs none of them.
_ROOMS = {
    "api": ("export", "init", "merge", "push", "quantize", "train"),
    "config": ("Config", "LoraConfig", "QuantConfig", "load_config"),
    "data": ("Dataset", "Tokenizer", "load_dataset"),
    "errors": ("QLoRAError",),
    "families.family": ("register_family",),
    "generation": ("QLoRAModel", "generate"),
    "runs.reporting": ("RunHistory", "read_log"),
    "runs": ("estimate", "evaluate", "open_adapter"),
    "grpo.trainer": ("Trainer",),
    "training": ("Step", "TrainResult", "TrainerCallback"),
    "version": ("__version__",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'qlora_wgpu' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"qlora_wgpu.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names alone: for tab completion, modules are not part of the interface."""
    return sorted(__all__)
