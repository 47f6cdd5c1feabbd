"""Gemma 3 with images: its text part, which is what a text adapter is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.gemma3_text import Gemma3


class Gemma3Conditional(Gemma3):
    """The family. Modules are called as in a running model, and so is its adapter by PEFT."""

    prefix = "language_model."
    stored_prefixes = (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    )

    def text(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of the config.json that counts, with what real files leave to defaults."""
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise UnsupportedModelError(
                "config.json: model_type 'gemma3' needs a text_config (text alone is 'gemma3_text')"
            )
        return {**_DEFAULTS, **text}


# Hugging Face's defaults of the text part, which checkpoints with images do not repeat.
_DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
}

FAMILY = Gemma3Conditional()
