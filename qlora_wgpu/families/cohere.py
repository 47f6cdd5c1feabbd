"""Command R and R+ (Cohere, 2024): halves of a layer at once, LayerNorms, neighbours rotated."""

from __future__ import annotations

from qlora_wgpu.families.parts.attention import Attention, QKLayerNorm
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import PARALLEL, Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.norm import LayerNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """Norms have no biases; logits are scaled; R+ normalizes heads (``use_qk_norm``)."""
    read.no_dropout("attention_dropout")
    dimensions = Dimensions.read(read)
    rope = read_rope(read.config, dimensions.head_dim, default_theta=500_000.0)
    bias = read.flag("attention_bias")
    eps = read.number("layer_norm_eps", 1e-5)
    attention = Attention(
        dimensions,
        rope,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QKLayerNorm(eps) if read.flag("use_qk_norm") else None,
        interleaved=True,
    )
    mlp = GatedMLP(dimensions, read_activation(read))
    norm = LayerNorm(eps, bias=False)
    return Decoder(
        dimensions,
        norm,
        layers=(Layer(norm, attention, mlp, PARALLEL),) * dimensions.num_hidden_layers,
        tied=read.flag("tie_word_embeddings", True),
        pad_token_id=0,
        logit_scale=read.number("logit_scale", 0.0625),
    )


FAMILY = DecoderFamily(compose)
