"""Mistral Small 3 and Ministral 3 with images (Mistral AI, 2025): their text part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import ministral3, mistral
from qlora_wgpu.families.parts.config import ConfigReader
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily

_TEXTS = {"mistral": mistral.compose, "ministral3": ministral3.compose}


def compose(read: ConfigReader) -> Decoder:
    """Modules are called as in a running model, and so is its adapter by PEFT."""
    text = read.config.get("text_config")
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(
            "config.json: model_type 'mistral3' needs a text_config (text alone is 'mistral' or "
            "'ministral3')"
        )
    kind = text.get("model_type", "mistral")
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise UnsupportedModelError(
            f"config.json: text_config has model_type {brief(kind)}, but of 'mistral3' "
            f"{' and '.join(_TEXTS)} are supported"
        )
    # Hugging Face's models are tied by default, but their files have a head of their own.
    tied = next((c["tie_word_embeddings"] for c in (text, read.config) if _says(c)), False)
    return replace(
        _TEXTS[kind](ConfigReader({**text, "tie_word_embeddings": tied})),
        prefix="model.language_model.",
        stored_prefixes=(
            ("model.language_model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
        ),
    )


def _says(config: Mapping[str, object]) -> bool:
    return config.get("tie_word_embeddings") is not None


FAMILY = DecoderFamily(compose)
