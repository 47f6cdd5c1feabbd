"""Qwen 3.5 with images: its text part and its tower."""

from qlora_wgpu.families import parts, qwen3_5_text, qwen3_next, qwen3_vl


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Modules have the names of ``AutoModelForImageTextToText``."""
    text = parts.text_config(read, ties=False)
    return reading_images(read, text, qwen3_5_text.compose(text))


def reading_images(
    read: parts.ConfigReader, text: parts.ConfigReader, decoder: parts.Decoder
) -> parts.Decoder:
    """Interleaved M-RoPE of the part of a head that is rotated."""
    decoder = decoder.within(parts.LANGUAGE_MODEL, "model.")
    plain, head_dim = parts.without_sections(text.config), decoder.dimensions.head_dim
    rope = parts.read_rope(plain, head_dim, default_partial=qwen3_next.SHARE)
    axes = parts.mrope_axes(text.config, (11, 11, 10), rope.rotary_dim // 2, interleaved=True)
    return parts.with_images(read, decoder, 248_056, axes=axes)


def compose_vision(read: parts.ConfigReader) -> parts.VisionTower:
    """As Qwen3-VL's, without DeepStack."""
    vision, _ = parts.vision_config(read, "qwen3_5_vision", "qwen3_5")
    return qwen3_vl.vision_tower(vision)
