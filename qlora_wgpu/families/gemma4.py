"""Gemma 4 with images: its text part and its tower, without audio."""

from dataclasses import replace

from qlora_wgpu.families import gemma4_text, parts

PREFIX = "model.language_model."
_MEDIA = {"image_token_id": 258_880, "audio_token_id": 258_881, "video_token_id": 258_884}
"""Hugging Face's defaults."""


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Modules have the names of transformers' model, which PEFT uses for the adapter."""
    text = gemma4_text.compose(parts.text_config(read))
    # Modules for images and sound have the same last names, and PEFT refuses to adapt them.
    media = media_ids(read, "audio_token_id", "video_token_id")
    decoder = replace(text, prefix=PREFIX, adapted_within=PREFIX, media_ids=media)
    return reading_images(read, decoder)


def compose_vision(read: parts.ConfigReader) -> parts.VisionTower:
    """Patches of images of any size, averaged and projected."""
    vision, _ = parts.vision_config(read, "gemma4_vision")
    return parts.read_gemma4_tower(read, vision)


def reading_images(read: parts.ConfigReader, decoder: parts.Decoder) -> parts.Decoder:
    """In larger models the tokens of an image attend to each other in layers that slide.

    The inputs of each layer are those of the padding token in place of images.
    """
    text = parts.text_config(read).config
    both = text.get("use_bidirectional_attention") == "vision"
    padding = parts.padding_idx(read.config, decoder.dimensions.vocab_size, decoder.pad_token_id)
    if padding is None:
        return decoder
    return parts.with_images(
        read, decoder, 258_880, bidirectional=both, only_sliding=both, stand_in=padding
    )


def media_ids(read: parts.ConfigReader, *keys: str) -> tuple[range, ...]:
    """Placeholders, for which transformers embeds the padding token even in texts."""
    ids = (read.count(key, _MEDIA[key]) for key in keys if read.config.get(key, 0) is not None)
    return tuple(range(token, token + 1) for token in ids)
