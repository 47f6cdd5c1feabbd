"""FlexOlmo (Ai2, 2025): as OLMo 2, with experts as in OLMoE in every layer."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    dimensions = parts.Dimensions.read(read)
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-6))
    attention = parts.read_attention(
        read,
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim, default_theta=500_000.0),
        qk_norm=parts.QKNorm(norm.eps, per_head=False),
    )
    experts = parts.SparseMoeBlock(
        dimensions.hidden_size,
        dimensions.intermediate_size,
        parts.read_activation(read),
        *parts.read_expert_counts(read, 7, 5),
        norm_topk_prob=read.flag("norm_topk_prob"),
    )
    return parts.read_decoder(
        read,
        norm,
        parts.Layer(norm, attention, experts, parts.POST_NORM),
        pad_token_id=100_277,
        balance=parts.read_balance_loss(read, 0.01),
    )
