"""Qwen 3.5 with images: its text part, which is what a text adapter is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import qwen3_5_text
from qlora_wgpu.families.parts.config import ConfigReader
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily


def compose(read: ConfigReader) -> Decoder:
    """The text part, whatever sees the images."""
    return compose_text(read, "qwen3_5", qwen3_5_text.compose)


def compose_text(
    read: ConfigReader, model_type: str, compose_part: Callable[[ConfigReader], Decoder]
) -> Decoder:
    """The text part of a model with images.

    Args:
        read: The whole config.json.
        model_type: Its type.
        compose_part: Reads a config.json of the text part.

    Raises:
        UnsupportedModelError: If there is no text part.
    """
    text = read.config.get("text_config")
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(
            f"config.json: model_type {model_type!r} needs a text_config (text alone is "
            f"'{model_type}_text')"
        )
    key = "tie_word_embeddings"
    tied = next((c[key] for c in (text, read.config) if c.get(key) is not None), False)
    return compose_part(ConfigReader({**text, key: tied}))


FAMILY = DecoderFamily(compose)
