"""Mixtral (Jiang et al., 2024): as Mistral, with experts in every layer."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Every layer slides, if there is a window; expert weights sum to one."""
    read.no_dropout("attention_dropout", "router_jitter_noise")
    dimensions = parts.Dimensions.read(read)
    rope = parts.read_rope(read.config, dimensions.head_dim, default_theta=1_000_000.0)
    attention = parts.Attention(dimensions, rope, window=read.optional_integer("sliding_window"))
    experts = parts.SparseMoeBlock(
        dimensions.hidden_size,
        dimensions.intermediate_size,
        parts.read_activation(read),
        *parts.read_expert_counts(read, 8, 2),
        norm_topk_prob=True,
        name="block_sparse_moe",
        held="mlp",
        leaves=("w1", "w3", "w2"),
    )
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    return parts.read_decoder(
        read, norm, parts.Layer(norm, attention, experts), balance=parts.read_balance_loss(read)
    )
