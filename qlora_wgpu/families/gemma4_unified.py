"""Gemma 4 12B with images and sound, without separate encoders: its text part."""

from dataclasses import replace

from qlora_wgpu.families import gemma4_unified_text, parts
from qlora_wgpu.families.gemma4 import PREFIX


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Modules have the names of transformers' model."""
    return replace(gemma4_unified_text.compose(parts.text_config(read)), prefix=PREFIX)
