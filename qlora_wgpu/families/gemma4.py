"""Gemma 4 with images and sound: its text part."""

from dataclasses import replace

from qlora_wgpu.families import gemma4_text, parts

PREFIX = "model.language_model."


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Modules have the names of transformers' model, which PEFT uses for the adapter."""
    text = gemma4_text.compose(parts.text_config(read))
    # Modules for images and sound have the same last names, and PEFT refuses to adapt them.
    return replace(text, prefix=PREFIX, adapted_within=PREFIX)
