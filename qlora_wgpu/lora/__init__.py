"""LoRA adapters: target modules, the layout on the device, and PEFT's files."""

from qlora_wgpu.lora.config import AdapterConfig
from qlora_wgpu.lora.peft_files import load_adapter, save_adapter

__all__ = ["AdapterConfig", "load_adapter", "save_adapter"]
