"""Gemma 4 12B with images and sound, which have no encoders of their own: its text part."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.families import gemma4_unified_text
from qlora_wgpu.families.gemma4 import PREFIX, text_config
from qlora_wgpu.families.parts.config import ConfigReader
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily


def compose(read: ConfigReader) -> Decoder:
    """Modules are called as in a running model."""
    return replace(gemma4_unified_text.compose(text_config(read, "gemma4_unified")), prefix=PREFIX)


FAMILY = DecoderFamily(compose)
