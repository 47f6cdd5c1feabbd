"""Generating text."""

from qlora_wgpu.generation.decoder import Decoder
from qlora_wgpu.generation.generate import generate

__all__ = ["Decoder", "generate"]
