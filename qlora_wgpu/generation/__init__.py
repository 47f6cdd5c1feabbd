"""Generating text."""

from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.generate import generate
from qlora_wgpu.generation.model import QLoRAModel
from qlora_wgpu.generation.sequence import Request
from qlora_wgpu.generation.text import continuation

__all__ = ["Engine", "QLoRAModel", "Request", "continuation", "generate"]
