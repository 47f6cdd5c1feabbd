"""EXAONE 4 (LG AI Research, 2025): norms after each half; only layers with a window rotate."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.families.attention import Attention, QKNorm
from qlora_wgpu.families.config_reader import ConfigReader
from qlora_wgpu.families.decoder import POST_NORM, Decoder, DecoderFamily, Layer
from qlora_wgpu.families.dimensions import Dimensions
from qlora_wgpu.families.mlp import GatedMLP, read_activation
from qlora_wgpu.families.norm import RMSNorm
from qlora_wgpu.families.rope import read_rope
from qlora_wgpu.families.windows import periodic_windows


def compose(read: ConfigReader) -> Decoder:
    """Three layers of four slide where nothing says otherwise; without a window, all rotate."""
    read = read.with_defaults(sliding_window=4096)
    read.no_dropout("attention_dropout")
    dimensions = Dimensions.read(read)
    rope, eps = read_rope(read.config, dimensions.head_dim), read.number("rms_norm_eps", 1e-5)
    attention = Attention(dimensions, rope, qk_norm=QKNorm(eps))
    unrotated = (
        attention if read.config["sliding_window"] is None else replace(attention, rope=None)
    )
    mlp, norm = GatedMLP(dimensions, read_activation(read)), RMSNorm(eps)
    attentions = [
        unrotated if window is None else replace(attention, window=window)
        for window in periodic_windows(read, dimensions.num_hidden_layers, every=4)
    ]
    return Decoder(
        dimensions,
        norm,
        layers=tuple(Layer(norm, each, mlp, POST_NORM) for each in attentions),
        tied=read.flag("tie_word_embeddings"),
    )


FAMILY = DecoderFamily(compose)
