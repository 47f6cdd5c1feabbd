"""Phi 3, 3.5 and 4-mini (Abdin et al., 2024): q, k and v in one layer, gate and up too."""

from __future__ import annotations

from qlora_wgpu.families.parts.attention import Attention, FusedQKV
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import FusedGatedMLP, read_activation
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """Every layer slides, if there is a window."""
    read.no_dropout("attention_dropout", "embd_pdrop", "resid_pdrop")
    read.choice("attention_bias", (None, False))
    dimensions = Dimensions.read(read)
    # transformers gives every such model a first length, which counts before that of RoPE's keys.
    config = read.with_defaults(original_max_position_embeddings=4096).config
    rope = read_rope(config, dimensions.head_dim, default_partial=1.0)
    window = read.optional_integer("sliding_window")
    attention = Attention(dimensions, rope, window, fused=FusedQKV())
    mlp = FusedGatedMLP(dimensions, read_activation(read))
    norm = RMSNorm(read.number("rms_norm_eps", 1e-5))
    return Decoder(
        dimensions,
        norm,
        layers=(Layer(norm, attention, mlp),) * dimensions.num_hidden_layers,
        tied=read.flag("tie_word_embeddings"),
        pad_token_id=32_000,
    )


FAMILY = DecoderFamily(compose)
