"""ERNIE 4.5, dense (Baidu, 2025): as Llama, with neighbours rotated."""

from __future__ import annotations

from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """One key gives biases to all layers."""
    read = read.with_defaults(num_key_value_heads=2, head_dim=128)
    dimensions = Dimensions.read(read)
    rope = read_rope(read.config, dimensions.head_dim, default_theta=500_000.0)
    bias = read.flag("use_bias")
    attention = Attention(dimensions, rope, qkv_bias=bias, o_bias=bias, interleaved=True)
    mlp = GatedMLP(dimensions, read_activation(read), bias)
    norm = RMSNorm(read.number("rms_norm_eps", 1e-5))
    return Decoder(
        dimensions,
        norm,
        layers=(Layer(norm, attention, mlp),) * dimensions.num_hidden_layers,
        tied=read.flag("tie_word_embeddings", True),
        pad_token_id=0,
    )


FAMILY = DecoderFamily(compose)
