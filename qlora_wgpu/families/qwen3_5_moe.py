"""Qwen 3.5 as a mixture of experts with images: its text part and its tower."""

from qlora_wgpu.families import parts, qwen3_5_moe_text, qwen3_vl
from qlora_wgpu.families.qwen3_5 import reading_images


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Modules have the names of ``AutoModelForImageTextToText``."""
    text = parts.text_config(read, ties=False)
    return reading_images(read, text, qwen3_5_moe_text.compose(text))


def compose_vision(read: parts.ConfigReader) -> parts.VisionTower:
    """As Qwen3-VL's, without DeepStack."""
    vision, _ = parts.vision_config(read, "qwen3_5_moe_vision", "qwen3_5_moe")
    return qwen3_vl.vision_tower(vision)
