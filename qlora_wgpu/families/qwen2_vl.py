"""Qwen2-VL (Wang et al., 2024): its language model, a Qwen 2."""

from collections.abc import Mapping
from dataclasses import replace

from qlora_wgpu.families import parts, qwen2


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Published files have the language model's keys next to ``vision_config``, not below."""
    text = read.config.get("text_config")
    part = parts.ConfigReader(text if isinstance(text, Mapping) else read.config)
    plain = parts.ConfigReader(parts.without_sections(part.config)).with_defaults(
        rms_norm_eps=1e-5,
        num_key_value_heads=8,
        sliding_window=4096,
        max_window_layers=80,
        rope_theta=1_000_000.0,
    )
    tied = read.flag("tie_word_embeddings", False) or part.flag("tie_word_embeddings", False)
    return replace(qwen2.compose(plain), tied=tied).within(parts.LANGUAGE_MODEL, "model.")
