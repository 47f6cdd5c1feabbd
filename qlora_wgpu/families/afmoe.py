"""Trinity (Arcee AI, 2025): gated attention, pre- and post-norms, experts with shared ones."""

import math
from dataclasses import replace

from qlora_wgpu.families import parts

ORDER = parts.ResidualOrder(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_mlp_layernorm",
    after_mlp="post_mlp_layernorm",
)


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Only layers with a sliding window use RoPE; the first ``num_dense_layers`` are dense."""
    read = read.with_defaults(head_dim=128, sliding_window=1024)
    dimensions = parts.Dimensions.read(read)
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    rope = parts.read_rope(read.config, dimensions.head_dim)
    full = parts.read_attention(
        read, dimensions, None, qk_norm=parts.QKNorm(norm.eps), gate="gate_proj"
    )
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    experts, dense = _experts(read, mlp), read.count("num_dense_layers", 1)
    every = read.integer("global_attn_every_n_layers", 4)
    count = dimensions.num_hidden_layers
    windows = parts.layer_windows(read, [(i + 1) % every != 0 for i in range(count)])
    attentions = [full if w is None else replace(full, rope=rope, window=w) for w in windows]
    layers = [
        parts.Layer(norm, attention, mlp if i < dense else experts, ORDER)
        for i, attention in enumerate(attentions)
    ]
    scale = math.sqrt(dimensions.hidden_size) if read.flag("mup_enabled") else 1.0
    return parts.read_decoder(read, norm, layers, embedding_scale=scale, noise_scale=scale)


def _experts(read: parts.ConfigReader, mlp: parts.GatedMLP) -> parts.SparseMoeBlock:
    """Experts by their sigmoid scores and a correction bias; weights sum to ``route_scale``."""
    count, top_k = read.integer("num_experts", 64), read.integer("num_experts_per_tok", 6)
    parts.check_expert_counts(read, ("num_experts", count), ("num_experts_per_tok", top_k))
    parts.refuse_balance_loss(read)
    size = read.integer("moe_intermediate_size", 1408)
    shared = replace(mlp.dimensions, intermediate_size=size * read.integer("num_shared_experts", 2))
    scoring = parts.Scoring(
        sigmoid=True, normalized=True, least=1e-20, scale=read.number("route_scale", 1.0)
    )
    return parts.SparseMoeBlock(
        mlp.dimensions.hidden_size,
        size,
        mlp.activation,
        count,
        top_k,
        router="router.gate",
        router_is_module=True,
        shared=parts.SharedExpert(replace(mlp, dimensions=shared, name="mlp.shared_experts")),
        choice=parts.Router(scoring, correction="mlp.expert_bias"),
    )
