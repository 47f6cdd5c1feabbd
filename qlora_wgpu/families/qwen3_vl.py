"""Qwen3-VL (Qwen team, 2025): its language model, a Qwen 3 without windows."""

from dataclasses import replace

from qlora_wgpu.families import parts, qwen3


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """The whole model's config ties embedding and head."""
    text = parts.text_config(read)
    plain = {**parts.without_sections(text.config), "use_sliding_window": False}
    part = parts.ConfigReader(plain).with_defaults(num_key_value_heads=32, rope_theta=500_000.0)
    decoder = replace(qwen3.compose(part), tied=read.flag("tie_word_embeddings", False))
    return decoder.within(parts.LANGUAGE_MODEL)
