"""Command R7B and Command A (Cohere, 2024): as Command R, most layers with a window."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.families.parts.attention import Attention, periodic_windows
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import PARALLEL, Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.norm import LayerNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """Layers that see everything know no positions."""
    read = read.with_defaults(sliding_window=4096)
    read.no_dropout("attention_dropout")
    dimensions = Dimensions.read(read)
    bias = read.flag("attention_bias")
    attention = Attention(
        dimensions,
        read_rope(read.config, dimensions.head_dim),
        qkv_bias=bias,
        o_bias=bias,
        interleaved=True,
    )
    mlp = GatedMLP(dimensions, read_activation(read))
    norm = LayerNorm(read.number("layer_norm_eps", 1e-5), bias=False)
    attentions = [
        replace(attention, rope=None) if window is None else replace(attention, window=window)
        for window in periodic_windows(read, dimensions.num_hidden_layers, every=4)
    ]
    return Decoder(
        dimensions,
        norm,
        layers=tuple(Layer(norm, each, mlp, PARALLEL) for each in attentions),
        tied=read.flag("tie_word_embeddings", True),
        pad_token_id=0,
        logit_scale=read.number("logit_scale", 0.0625),
    )


FAMILY = DecoderFamily(compose)
