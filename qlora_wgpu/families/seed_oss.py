"""Seed-OSS (ByteDance, 2025): as Llama, with biases of q, k and v."""

from __future__ import annotations

from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope

DROPOUTS = ("attention_dropout", "residual_dropout")


def compose(read: ConfigReader) -> Decoder:
    """Seed-OSS without its dropouts; a note says so where they are not zero."""
    read = read.with_defaults(num_key_value_heads=8, head_dim=128)
    dimensions = Dimensions.read(read)
    attention = Attention(
        dimensions,
        read_rope(read.config, dimensions.head_dim),
        qkv_bias=read.flag("attention_bias", True),
        o_bias=read.flag("attention_out_bias"),
    )
    mlp = GatedMLP(dimensions, read_activation(read), read.flag("mlp_bias"))
    norm = RMSNorm(read.number("rms_norm_eps", 1e-6))
    return Decoder(
        dimensions,
        norm,
        layers=(Layer(norm, attention, mlp),) * dimensions.num_hidden_layers,
        tied=read.flag("tie_word_embeddings"),
        pad_token_id=1,
        notes=read.dropped(dict.fromkeys(DROPOUTS, 0.1)),
    )


FAMILY = DecoderFamily(compose)
