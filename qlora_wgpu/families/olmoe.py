"""OLMoE (Muennighoff et al., 2024): norms over all of q and of k, experts in every layer."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """A window is refused, since only some of transformers' kernels apply it."""
    read.choice("sliding_window", (None,))
    dimensions = parts.Dimensions.read(read)
    eps = read.number("rms_norm_eps", 1e-5)
    attention = parts.read_attention(
        read,
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim),
        qk_norm=parts.QKNorm(eps, per_head=False),
        clip=read.softcap("clip_qkv"),
    )
    experts = parts.SparseMoeBlock(
        dimensions.hidden_size,
        dimensions.intermediate_size,
        parts.read_activation(read),
        *parts.read_expert_counts(read, 64, 8),
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
