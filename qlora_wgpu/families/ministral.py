"""Ministral 8B (Mistral AI, 2024): as Mistral, windows by layer."""

from qlora_wgpu.families import mistral, parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Every layer slides by default."""
    return mistral.compose(read.with_defaults(num_key_value_heads=8))
