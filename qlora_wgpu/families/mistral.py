"""Mistral (Jiang et al., 2023): as Llama, with a sliding window."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.families.parts.attention import Attention, layer_windows
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """Every layer slides, if there is a window."""
    read = read.with_defaults(sliding_window=4096)
    read.no_dropout("attention_dropout")
    dimensions = Dimensions.read(read)
    slides = read.config["sliding_window"] is not None
    windows = layer_windows(read, [slides] * dimensions.num_hidden_layers)
    attention = Attention(dimensions, read_rope(read.config, dimensions.head_dim))
    mlp = GatedMLP(dimensions, read_activation(read))
    norm = RMSNorm(read.number("rms_norm_eps", 1e-6))
    return Decoder(
        dimensions,
        norm,
        layers=tuple(Layer(norm, replace(attention, window=w), mlp) for w in windows),
        tied=read.flag("tie_word_embeddings"),
    )


FAMILY = DecoderFamily(compose)
