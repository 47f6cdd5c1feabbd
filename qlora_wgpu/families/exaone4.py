"""EXAONE 4 (LG AI Research, 2025): norms after each half; only layers with a window rotate."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.families.parts.attention import Attention, QKNorm, periodic_windows
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import POST_NORM, Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """A gated MLP in every layer."""
    read = read.with_defaults(sliding_window=4096)
    dimensions = Dimensions.read(read)
    norm = RMSNorm(read.number("rms_norm_eps", 1e-5))
    mlp = GatedMLP(dimensions, read_activation(read))
    return Decoder(
        dimensions,
        norm,
        layers=tuple(
            Layer(norm, each, mlp, POST_NORM)
            for each in read_attentions(read, dimensions, norm.eps)
        ),
        tied=read.flag("tie_word_embeddings"),
    )


def read_attentions(read: ConfigReader, dimensions: Dimensions, eps: float) -> list[Attention]:
    """Three layers of four slide where nothing says otherwise; without a window, all rotate.

    Args:
        read: The config.json, with a ``sliding_window``, which may be null.
        dimensions: The model's sizes.
        eps: Of the heads' norms.
    """
    read.no_dropout("attention_dropout")
    rope = read_rope(read.config, dimensions.head_dim)
    attention = Attention(dimensions, rope, qk_norm=QKNorm(eps))
    unrotated = (
        attention if read.config["sliding_window"] is None else replace(attention, rope=None)
    )
    return [
        unrotated if window is None else replace(attention, window=window)
        for window in periodic_windows(read, dimensions.num_hidden_layers, every=4)
    ]


FAMILY = DecoderFamily(compose)
