"""Llama (Touvron et al., 2023; Grattafiori et al., 2024): Llama 1 to 3, TinyLlama, SmolLM."""

from __future__ import annotations

from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """RMSNorms before a rotated attention and a gated MLP."""
    read.no_dropout("attention_dropout")
    dimensions = Dimensions.read(read)
    rope = read_rope(read.config, dimensions.head_dim)
    bias = read.flag("attention_bias")
    attention = Attention(dimensions, rope, qkv_bias=bias, o_bias=bias)
    mlp = GatedMLP(dimensions, read_activation(read), bias=read.flag("mlp_bias"))
    norm = RMSNorm(read.number("rms_norm_eps", 1e-6))
    return Decoder(
        dimensions,
        norm,
        layers=(Layer(norm, attention, mlp),) * dimensions.num_hidden_layers,
        tied=read.flag("tie_word_embeddings"),
    )


FAMILY = DecoderFamily(compose)
