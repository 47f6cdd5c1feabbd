"""Checkpoints: Hugging Face models in, and files that appear whole."""

from qlora_wgpu.checkpoint.atomic import atomic_folder, write_file, write_safetensors
from qlora_wgpu.checkpoint.model_folder import ModelFolder
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile

__all__ = [
    "ModelFolder",
    "SafetensorsFile",
    "atomic_folder",
    "write_file",
    "write_safetensors",
]
