"""Gemma 3 with images: its text part, which is what a text adapter is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import gemma3_text
from qlora_wgpu.families.parts.config import ConfigReader
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily


def compose(read: ConfigReader) -> Decoder:
    """Modules are called as in a running model, and so is its adapter by PEFT."""
    text = read.config.get("text_config")
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(
            "config.json: model_type 'gemma3' needs a text_config (text alone is 'gemma3_text')"
        )
    # Hugging Face's defaults of the text part, which checkpoints with images do not repeat.
    part = ConfigReader(text).with_defaults(
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, vocab_size=262_208
    )
    return replace(
        gemma3_text.compose(part),
        prefix="model.language_model.",
        stored_prefixes=(
            ("model.language_model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
        ),
    )


FAMILY = DecoderFamily(compose)
