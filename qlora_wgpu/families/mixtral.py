"""Mixtral (Jiang et al., 2024): as Mistral, every MLP a mixture of experts."""

from __future__ import annotations

from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import read_activation
from qlora_wgpu.families.parts.moe import Experts, read_balance_loss, read_expert_counts
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """Every layer slides, if there is a window; the weights of a token's experts sum to one."""
    read.no_dropout("attention_dropout", "router_jitter_noise")
    dimensions = Dimensions.read(read)
    rope = read_rope(read.config, dimensions.head_dim, default_theta=1_000_000.0)
    attention = Attention(dimensions, rope, window=read.optional_integer("sliding_window"))
    num_experts, num_experts_per_tok = read_expert_counts(read, 8, 2)
    experts = Experts(
        dimensions.hidden_size,
        dimensions.intermediate_size,
        read_activation(read),
        num_experts,
        num_experts_per_tok,
        norm_topk_prob=True,
        name="block_sparse_moe",
        held="mlp",
        leaves=("w1", "w3", "w2"),
    )
    norm = RMSNorm(read.number("rms_norm_eps", 1e-5))
    return Decoder(
        dimensions,
        norm,
        layers=(Layer(norm, attention, experts),) * dimensions.num_hidden_layers,
        tied=read.flag("tie_word_embeddings"),
        balance=read_balance_loss(read),
    )


FAMILY = DecoderFamily(compose)
