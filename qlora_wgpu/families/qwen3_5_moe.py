"""Qwen 3.5 as a mixture of experts with images: its text part."""

from __future__ import annotations

from qlora_wgpu.families import qwen3_5_moe_text
from qlora_wgpu.families.parts.config import ConfigReader
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily
from qlora_wgpu.families.qwen3_5 import compose_text


def compose(read: ConfigReader) -> Decoder:
    """The text part, whatever sees the images."""
    return compose_text(read, "qwen3_5_moe", qwen3_5_moe_text.compose)


FAMILY = DecoderFamily(compose)
