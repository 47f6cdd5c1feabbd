"""LFM2 as a mixture of experts (Liquid AI, 2025): LFM2-8B-A1B and others."""

from qlora_wgpu.families import parts
from qlora_wgpu.families.lfm2 import attending_types, compose_with, gated_mlp


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """The first layers are dense; the others route by sigmoids and a bias."""
    read = read.with_defaults(num_key_value_heads=8, intermediate_size=7168)
    dimensions = parts.Dimensions.read(read)
    attends = attending_types(read, dimensions.num_hidden_layers)
    dense, mlp = read.count("num_dense_layers", 2), gated_mlp(dimensions)
    parts.refuse_balance_loss(read)
    scoring = parts.Scoring(
        sigmoid=True,
        normalized=read.flag("norm_topk_prob", True),
        least=1e-6,
        scale=read.number("routed_scaling_factor", 1.0),
    )
    corrected = read.flag("use_expert_bias", True)
    experts = parts.SparseMoeBlock(
        dimensions.hidden_size,
        read.integer("moe_intermediate_size", 1792),
        mlp.activation,
        *parts.read_expert_counts(read, 32, 4),
        name=mlp.name,
        leaves=mlp.leaves,
        fused=False,
        choice=parts.Router(scoring, correction="feed_forward.expert_bias" if corrected else None),
    )
    mlps = [mlp if i < dense else experts for i in range(len(attends))]
    return compose_with(read, dimensions, attends, mlps)
