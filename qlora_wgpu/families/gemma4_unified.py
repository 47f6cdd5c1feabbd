"""Gemma 4 12B with images and sound, without separate encoders: its text part."""

from dataclasses import replace

from qlora_wgpu.families import gemma4_unified_text, parts
from qlora_wgpu.families.gemma4 import PREFIX, media_ids


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Modules have the names of transformers' model."""
    text = gemma4_unified_text.compose(parts.text_config(read))
    media = media_ids(read, "image_token_id", "audio_token_id", "video_token_id")
    return replace(text, prefix=PREFIX, media_ids=media)
