"""Generating text."""

from qlora_wgpu.generation.generate import generate

__all__ = ["generate"]
