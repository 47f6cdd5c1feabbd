"""Qwen 3.5 with images: its text part."""

from qlora_wgpu.families import parts, qwen3_5_text


def compose(read: parts.ConfigReader) -> parts.Decoder:
    return qwen3_5_text.compose(parts.text_config(read, ties=False))
