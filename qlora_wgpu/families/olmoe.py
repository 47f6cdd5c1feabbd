"""OLMoE (Muennighoff et al., 2024): norms over all of q and of k, every MLP a mixture."""

from __future__ import annotations

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """A window is refused, which some of transformers' kernels know and others do not."""
    read.no_dropout("attention_dropout")
    read.choice("sliding_window", (None,))
    dimensions = parts.Dimensions.read(read)
    bias, eps = read.flag("attention_bias"), read.number("rms_norm_eps", 1e-5)
    attention = parts.Attention(
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=parts.QKNorm(eps, per_head=False),
        clip=read.softcap("clip_qkv"),
    )
    num_experts, num_experts_per_tok = parts.read_expert_counts(read, 64, 8)
    experts = parts.SparseMoeBlock(
        dimensions.hidden_size,
        dimensions.intermediate_size,
        parts.read_activation(read),
        num_experts,
        num_experts_per_tok,
        norm_topk_prob=read.flag("norm_topk_prob"),
    )
    norm = parts.RMSNorm(eps)
    return parts.read_decoder(
        read,
        norm,
        parts.Layer(norm, attention, experts),
        pad_token_id=1,
        balance=parts.read_balance_loss(read, 0.01),
    )


FAMILY = parts.DecoderFamily(compose)
