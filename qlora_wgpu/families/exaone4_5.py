"""EXAONE 4.5 (LG AI Research, 2026): its language model, an EXAONE 4."""

from collections.abc import Mapping

from qlora_wgpu.families import parts

FIRST_NAME = "exaone4_5_text"
"""The text part's ``model_type`` in the first files."""


def compose(read: parts.ConfigReader) -> parts.Decoder:
    text = read.config.get("text_config")
    if isinstance(text, Mapping) and text.get("model_type") == FIRST_NAME:
        text = {**text, "model_type": "exaone4"}
    whole = parts.ConfigReader({**read.config, "text_config": text})
    return parts.read_language_model(whole, "exaone4").within(parts.LANGUAGE_MODEL)
