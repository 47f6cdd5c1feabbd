"""Gemma 4 with images and sound: its text part, which is what a text adapter is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import gemma4_text
from qlora_wgpu.families.config_reader import ConfigReader
from qlora_wgpu.families.decoder import Decoder, DecoderFamily


def compose(read: ConfigReader) -> Decoder:
    """Modules are called as in a running model, and so is its adapter by PEFT."""
    text = read.config.get("text_config")
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(
            "config.json: model_type 'gemma4' needs a text_config (text alone is 'gemma4_text')"
        )
    prefix = "model.language_model."
    # Modules of the parts for images and sound are called alike, and PEFT refuses to adapt them.
    return replace(gemma4_text.compose(ConfigReader(text)), prefix=prefix, adapted_within=prefix)


FAMILY = DecoderFamily(compose)
