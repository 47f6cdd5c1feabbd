"""Gemma 4 with images and sound: its text part, which is what a text adapter is for."""

from dataclasses import replace

from qlora_wgpu.families import gemma4_text, parts

PREFIX = "model.language_model."


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Modules are called as in a running model, and so is its adapter by PEFT."""
    text = gemma4_text.compose(parts.text_config(read))
    # Modules of the parts for images and sound are called alike, and PEFT refuses to adapt them.
    return replace(text, prefix=PREFIX, adapted_within=PREFIX)
