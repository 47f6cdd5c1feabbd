"""OLMoE (Muennighoff et al., 2024): norms over all of q and of k, every MLP a mixture."""

from __future__ import annotations

from qlora_wgpu.families.parts.attention import Attention, QKNorm
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import read_activation
from qlora_wgpu.families.parts.moe import Experts, read_balance_loss, read_expert_counts
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """A window is refused, which some of transformers' kernels know and others do not."""
    read.no_dropout("attention_dropout")
    read.choice("sliding_window", (None,))
    dimensions = Dimensions.read(read)
    bias, eps = read.flag("attention_bias"), read.number("rms_norm_eps", 1e-5)
    attention = Attention(
        dimensions,
        read_rope(read.config, dimensions.head_dim),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QKNorm(eps, per_head=False),
        clip=read.softcap("clip_qkv"),
    )
    num_experts, num_experts_per_tok = read_expert_counts(read, 64, 8)
    experts = Experts(
        dimensions.hidden_size,
        dimensions.intermediate_size,
        read_activation(read),
        num_experts,
        num_experts_per_tok,
        norm_topk_prob=read.flag("norm_topk_prob"),
    )
    norm = RMSNorm(eps)
    return Decoder(
        dimensions,
        norm,
        layers=(Layer(norm, attention, experts),) * dimensions.num_hidden_layers,
        tied=read.flag("tie_word_embeddings"),
        pad_token_id=1,
        balance=read_balance_loss(read, 0.01),
    )


FAMILY = DecoderFamily(compose)
