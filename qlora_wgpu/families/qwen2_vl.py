"""Qwen2-VL (Wang et al., 2024): its language model, a Qwen 2, and its tower."""

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
    decoder = replace(qwen2.compose(plain), tied=tied).within(parts.LANGUAGE_MODEL, "model.")
    pairs = decoder.dimensions.head_dim // 2
    axes = parts.mrope_axes(part.config, (16, 24, 24), pairs)
    return decoder if axes is None else parts.with_images(read, decoder, 151_655, axes=axes)


def compose_vision(read: parts.ConfigReader) -> parts.VisionTower:
    """LayerNorms and plain MLPs, and rotary positions by rows and columns."""
    vision, _ = parts.vision_config(read, "qwen2_vl_vision", "qwen2_vl")
    size, heads = vision.integer("embed_dim", 1280), vision.integer("num_heads", 16)
    inner = int(size * vision.number("mlp_ratio", 4))
    of = parts.tower_sizes(size, inner, vision.integer("depth", 32), heads)
    activation = parts.read_activation(vision, "quick_gelu")
    mlp = parts.PlainMLP(of, activation, True, ("fc1", "fc2"))
    norm = parts.LayerNorm(1e-6, bias=True)
    names = parts.QwenNames(norm, mlp, size, vision.integer("hidden_size", 3584))
    return parts.read_qwen_tower(vision, names)
