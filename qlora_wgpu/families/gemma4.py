"""Gemma 4 with images and sound: its text part, which is what a text adapter is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import gemma4_text
from qlora_wgpu.families.parts.config import ConfigReader
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily

PREFIX = "model.language_model."


def compose(read: ConfigReader) -> Decoder:
    """Modules are called as in a running model, and so is its adapter by PEFT."""
    text = gemma4_text.compose(text_config(read, "gemma4"))
    # Modules of the parts for images and sound are called alike, and PEFT refuses to adapt them.
    return replace(text, prefix=PREFIX, adapted_within=PREFIX)


def text_config(read: ConfigReader, model_type: str) -> ConfigReader:
    """The config.json of the text part.

    Raises:
        UnsupportedModelError: If there is none.
    """
    text = read.config.get("text_config")
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(
            f"config.json: model_type '{model_type}' needs a text_config (text alone is "
            f"'{model_type}_text')"
        )
    return ConfigReader(text)


FAMILY = DecoderFamily(compose)
