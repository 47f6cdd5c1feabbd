"""Qwen 2 and 2.5 (Yang et al., 2024): as Llama, with biases on q, k and v."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.families.parts.attention import Attention, upper_windows
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """Layers from ``max_window_layers`` on slide, if windows are used at all."""
    read.no_dropout("attention_dropout")
    dimensions = Dimensions.read(read)
    windows = upper_windows(read, dimensions.num_hidden_layers)
    rope = read_rope(read.config, dimensions.head_dim)
    attention = Attention(dimensions, rope, qkv_bias=True)
    mlp = GatedMLP(dimensions, read_activation(read))
    norm = RMSNorm(read.number("rms_norm_eps", 1e-6))
    return Decoder(
        dimensions,
        norm,
        layers=tuple(Layer(norm, replace(attention, window=w), mlp) for w in windows),
        tied=read.flag("tie_word_embeddings"),
    )


FAMILY = DecoderFamily(compose)
