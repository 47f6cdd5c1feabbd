"""Mixtral (Jiang et al., 2024): as Mistral, every MLP a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.families.attention import Attention
from qlora_wgpu.families.config_reader import ConfigReader
from qlora_wgpu.families.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.dimensions import Dimensions
from qlora_wgpu.families.mlp import read_activation
from qlora_wgpu.families.moe import Experts, read_expert_counts
from qlora_wgpu.families.norm import RMSNorm
from qlora_wgpu.families.rope import read_rope
from qlora_wgpu.families.windows import layer_windows


def compose(read: ConfigReader) -> Decoder:
    """Every layer slides, if there is a window; the weights of a token's experts sum to one."""
    read.no_dropout("attention_dropout", "router_jitter_noise")
    dimensions = Dimensions.read(read)
    slides = read.config.get("sliding_window") is not None
    windows = layer_windows(read, [slides] * dimensions.num_hidden_layers)
    rope = read_rope(read.config, dimensions.head_dim, default_theta=1_000_000.0)
    attention = Attention(dimensions, rope)
    num_experts, num_experts_per_tok = read_expert_counts(read, 8, 2)
    experts = Experts(
        dimensions.hidden_size,
        dimensions.intermediate_size,
        read_activation(read),
        num_experts,
        num_experts_per_tok,
        norm_topk_prob=True,
        name="block_sparse_moe",
        leaves=("w1", "w3", "w2"),
    )
    norm = RMSNorm(read.number("rms_norm_eps", 1e-5))
    return Decoder(
        dimensions,
        norm,
        layers=tuple(Layer(norm, replace(attention, window=w), experts) for w in windows),
        tied=read.flag("tie_word_embeddings"),
    )


FAMILY = DecoderFamily(compose)
