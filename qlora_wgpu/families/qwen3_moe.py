"""Qwen 3 as a mixture of experts (Yang et al., 2025): Qwen3-30B-A3B, Qwen3-Coder and others."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Qwen 3 with experts in some or all layers; either all layers have a window or none."""
    dimensions = parts.Dimensions.read(read)
    eps = read.number("rms_norm_eps", 1e-6)
    attention = parts.read_attention(
        read,
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim),
        window=_window(read),
        qk_norm=parts.QKNorm(eps),
    )
    mlp, experts = (
        parts.GatedMLP(dimensions, parts.read_activation(read)),
        _experts(read, dimensions),
    )
    norm = parts.RMSNorm(eps)
    layers = [
        parts.Layer(norm, attention, experts if sparse else mlp)
        for sparse in parts.sparse_layers(read, dimensions.num_hidden_layers)
    ]
    return parts.read_decoder(read, norm, layers, balance=parts.read_balance_loss(read))


def _window(read: parts.ConfigReader) -> int | None:
    read = read.with_defaults(sliding_window=4096)
    return read.optional_integer("sliding_window") if read.flag("use_sliding_window") else None


def _experts(read: parts.ConfigReader, dimensions: parts.Dimensions) -> parts.SparseMoeBlock:
    return parts.SparseMoeBlock(
        dimensions.hidden_size,
        read.integer("moe_intermediate_size", 768),
        parts.read_activation(read),
        *parts.read_expert_counts(read, 128, 8),
        norm_topk_prob=read.flag("norm_topk_prob"),
    )
