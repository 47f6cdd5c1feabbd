"""DeepSeek-V2 (2024): latent attention, and softmax routing: DeepSeek-V2-Lite."""

from dataclasses import replace

from qlora_wgpu.families import parts

SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """The first ``first_k_dense_replace`` layers are dense."""
    read.no_dropout("attention_dropout")
    # Its RoPE is always interleaved.
    attention = replace(parts.read_latent_attention(read, SIZES, q_rank=1536), interleaved=True)
    dimensions = attention.dimensions
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read), read.flag("mlp_bias"))
    experts, norm = _experts(read, mlp), parts.RMSNorm(read.number("rms_norm_eps", 1e-6))
    dense = read.count("first_k_dense_replace", 0)
    layers = [
        parts.Layer(norm, attention, mlp if i < dense else experts)
        for i in range(dimensions.num_hidden_layers)
    ]
    return parts.read_decoder(read, norm, layers)


def _experts(read: parts.ConfigReader, mlp: parts.GatedMLP) -> parts.SparseMoeBlock:
    """Weights are never normalized, as in transformers; config.json must not ask for it."""
    read = read.renamed("n_routed_experts", "num_experts")
    read.choice("norm_topk_prob", (False, None))
    read.choice("scoring_func", ("softmax", None))
    read.choice("moe_layer_freq", (1, None))
    method = read.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    num_experts, top_k = read.integer("n_routed_experts", 64), read.integer("num_experts_per_tok")
    parts.check_expert_counts(
        read, ("n_routed_experts", num_experts), ("num_experts_per_tok", top_k)
    )
    parts.refuse_balance_loss(read)
    size = read.integer("moe_intermediate_size", 1407)
    shared = replace(mlp.dimensions, intermediate_size=size * read.integer("n_shared_experts", 2))
    if method == "greedy":
        read = parts.ConfigReader({**read.config, "n_group": 1, "topk_group": 1})
    scoring = parts.Scoring(sigmoid=False, normalized=False)
    return parts.SparseMoeBlock(
        mlp.dimensions.hidden_size,
        size,
        mlp.activation,
        num_experts,
        top_k,
        shared=parts.SharedExpert(replace(mlp, dimensions=shared, name="mlp.shared_experts")),
        choice=parts.Router(parts.read_groups(read, num_experts, top_k, scoring)),
    )
