"""Gemma 3n with images and sound: its text part."""

from dataclasses import replace

from qlora_wgpu.families import gemma3n_text, parts


def compose(read: parts.ConfigReader) -> parts.AltUpDecoder:
    """Modules have the names of transformers' model, and only the text part's are adapted.

    Tokens of images and sound, which no text has, have embeddings of their own there.
    """
    text = gemma3n_text.compose(parts.text_config(read))
    # Modules for images and sound have the same last names.
    return replace(text, prefix=parts.LANGUAGE_MODEL, adapted_within=parts.LANGUAGE_MODEL)
