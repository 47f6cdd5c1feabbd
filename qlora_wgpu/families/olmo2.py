"""OLMo 2 (Walsh et al., 2025): norms after each half, and over all of q and of k."""

from __future__ import annotations

from qlora_wgpu.families.parts.attention import Attention, QKNorm
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import POST_NORM, Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """Attention and MLP read the residual stream as it is."""
    read.no_dropout("attention_dropout")
    dimensions = Dimensions.read(read)
    rope = read_rope(read.config, dimensions.head_dim)
    bias, eps = read.flag("attention_bias"), read.number("rms_norm_eps", 1e-5)
    qk_norm = QKNorm(eps, per_head=False)
    attention = Attention(dimensions, rope, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)
    mlp = GatedMLP(dimensions, read_activation(read))
    norm = RMSNorm(eps)
    return Decoder(
        dimensions,
        norm,
        layers=(Layer(norm, attention, mlp, POST_NORM),) * dimensions.num_hidden_layers,
        tied=read.flag("tie_word_embeddings"),
        pad_token_id=1,
    )


FAMILY = DecoderFamily(compose)
