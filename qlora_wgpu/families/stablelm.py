"""StableLM 2 and 3B (Bellagente et al., 2024): LayerNorms, and heads rotated in part."""

from __future__ import annotations

from qlora_wgpu.families.parts.attention import Attention, QKLayerNorm
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import PARALLEL, PRE_NORM, Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.norm import LayerNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """Both halves at once, if ``use_parallel_residual`` says so; 12B also normalizes heads."""
    read.no_dropout("attention_dropout", "hidden_dropout")
    dimensions = Dimensions.read(read)
    rope = read_rope(read.config, dimensions.head_dim, default_partial=0.25)
    eps = read.number("layer_norm_eps", 1e-5)
    per_head = QKLayerNorm(eps, names=("q_layernorm.norms.*", "k_layernorm.norms.*"))
    attention = Attention(
        dimensions,
        rope,
        qkv_bias=read.flag("use_qkv_bias"),
        qk_norm=per_head if read.flag("qk_layernorm") else None,
    )
    mlp = GatedMLP(dimensions, read_activation(read))
    norm = LayerNorm(eps, bias=True)
    order = PARALLEL if read.flag("use_parallel_residual") else PRE_NORM
    return Decoder(
        dimensions,
        norm,
        layers=(Layer(norm, attention, mlp, order),) * dimensions.num_hidden_layers,
        tied=read.flag("tie_word_embeddings"),
    )


FAMILY = DecoderFamily(compose)
