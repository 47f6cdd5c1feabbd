"""Qwen3-VL (Qwen team, 2025): its language model, a Qwen 3 without windows."""

from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts, qwen3


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """The whole model's config ties embedding and head."""
    text = parts.text_config(read)
    plain = {**parts.without_sections(text.config), "use_sliding_window": False}
    part = parts.ConfigReader(plain).with_defaults(num_key_value_heads=32, rope_theta=500_000.0)
    decoder = replace(qwen3.compose(part), tied=read.flag("tie_word_embeddings", False))
    return reading_images(read, text, decoder.within(parts.LANGUAGE_MODEL))


def reading_images(
    read: parts.ConfigReader, text: parts.ConfigReader, decoder: parts.Decoder
) -> parts.Decoder:
    """Interleaved M-RoPE; features of some of the tower's layers are added after the first ones."""
    pairs = decoder.dimensions.head_dim // 2
    axes = parts.mrope_axes(text.config, (24, 20, 20), pairs, interleaved=True)
    tower = read.config.get("vision_config") or {}
    taken = tower.get("deepstack_visual_indexes", (8, 16, 24))
    if not isinstance(taken, list | tuple):
        raise UnsupportedModelError(
            f"config.json: deepstack_visual_indexes must be a list of layers, got {brief(taken)}"
        )
    return parts.with_images(read, decoder, 151_655, axes=axes, deepstack=len(taken))
