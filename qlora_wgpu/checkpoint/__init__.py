"""Checkpoints: Hugging Face models in, PEFT adapters in and out, and files that appear whole."""

from qlora_wgpu.checkpoint.adapter import load_adapter, save_adapter
from qlora_wgpu.checkpoint.adapter_config import AdapterConfig
from qlora_wgpu.checkpoint.atomic import atomic_folder, write_file, write_safetensors
from qlora_wgpu.checkpoint.model_folder import ModelFolder
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile

__all__ = [
    "AdapterConfig",
    "ModelFolder",
    "SafetensorsFile",
    "atomic_folder",
    "load_adapter",
    "save_adapter",
    "write_file",
    "write_safetensors",
]
