"""Qwen 3 (Yang et al., 2025): as Llama, with normalized queries and keys."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.families.parts.attention import Attention, QKNorm, upper_windows
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """Layers from ``max_window_layers`` on slide, if windows are used at all."""
    read.no_dropout("attention_dropout")
    dimensions = Dimensions.read(read, head_dim=128)
    windows = upper_windows(read, dimensions.num_hidden_layers)
    rope = read_rope(read.config, dimensions.head_dim)
    bias, eps = read.flag("attention_bias"), read.number("rms_norm_eps", 1e-6)
    attention = Attention(dimensions, rope, qkv_bias=bias, o_bias=bias, qk_norm=QKNorm(eps))
    mlp = GatedMLP(dimensions, read_activation(read))
    norm = RMSNorm(eps)
    return Decoder(
        dimensions,
        norm,
        layers=tuple(Layer(norm, replace(attention, window=w), mlp) for w in windows),
        tied=read.flag("tie_word_embeddings"),
    )


FAMILY = DecoderFamily(compose)
