"""Gemma 3n with images and sound: its text part."""

from collections.abc import Mapping
from dataclasses import replace

from qlora_wgpu.families import gemma3n_text, parts


def compose(read: parts.ConfigReader) -> parts.AltUpDecoder:
    """Modules have the names of transformers' model, and only the text part's are adapted.

    Tokens of images and sound have embeddings of their own there, which are not read.
    """
    text = gemma3n_text.compose(parts.text_config(read))
    first = min(
        _vocab_offset(read, "vision_config", 262_144), _vocab_offset(read, "audio_config", 262_272)
    )
    media = range(first, text.dimensions.vocab_size)
    return replace(
        text,
        prefix=parts.LANGUAGE_MODEL,
        # Modules for images and sound have the same last names.
        adapted_within=parts.LANGUAGE_MODEL,
        media_ids=(media,) if media else (),
    )


def _vocab_offset(read: parts.ConfigReader, part: str, default: int) -> int:
    """The first of the token ids that a part embeds."""
    config = read.config.get(part)
    inner = parts.ConfigReader(config if isinstance(config, Mapping) else {})
    return inner.count("vocab_offset", default)
