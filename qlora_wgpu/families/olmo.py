"""OLMo 1 (Ai2, 2024): as Llama, with norms that have no weights; 7B bounds queries to values."""

from __future__ import annotations

from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.norm import LayerNorm
from qlora_wgpu.families.parts.rope import read_rope

EPS = 1e-5
"""No key says it."""


def compose(read: ConfigReader) -> Decoder:
    """``clip_qkv`` is the largest magnitude of what q, k and v make."""
    read.no_dropout("attention_dropout")
    dimensions = Dimensions.read(read)
    bias = read.flag("attention_bias")
    attention = Attention(
        dimensions,
        read_rope(read.config, dimensions.head_dim),
        qkv_bias=bias,
        o_bias=bias,
        clip=read.softcap("clip_qkv"),
    )
    mlp = GatedMLP(dimensions, read_activation(read))
    norm = LayerNorm(EPS, bias=False, weight=False)
    return Decoder(
        dimensions,
        norm,
        layers=(Layer(norm, attention, mlp),) * dimensions.num_hidden_layers,
        tied=read.flag("tie_word_embeddings"),
        pad_token_id=1,
    )


FAMILY = DecoderFamily(compose)
