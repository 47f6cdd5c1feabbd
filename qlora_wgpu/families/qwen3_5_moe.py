"""Qwen 3.5 as a mixture of experts with images: its text part and its tower."""

from qlora_wgpu.families import parts, qwen3_5_moe_text, qwen3_vl


def compose(read: parts.ConfigReader) -> parts.Decoder:
    return qwen3_5_moe_text.compose(parts.text_config(read, ties=False))


def compose_vision(read: parts.ConfigReader) -> parts.VisionTower:
    """As Qwen3-VL's, without DeepStack."""
    vision, _ = parts.vision_config(read, "qwen3_5_moe_vision", "qwen3_5_moe")
    return qwen3_vl.vision_tower(vision)
