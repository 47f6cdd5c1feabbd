"""GLM-4.5, 4.6 and 4.7 as mixtures of experts (Zeng et al., 2025): GLM-4.5-Air and others."""

from collections.abc import Mapping
from dataclasses import replace

from qlora_wgpu.families import parts

CORRECTION = "mlp.gate.e_score_correction_bias"


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """The first layers are dense; half of each head is rotated."""
    read.no_dropout("attention_dropout")
    read = read.with_defaults(num_key_value_heads=8)
    dimensions = parts.Dimensions.read(read)
    eps = read.number("rms_norm_eps", 1e-5)
    attention = parts.Attention(
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim, default_partial=0.5),
        qkv_bias=read.flag("attention_bias"),
        qk_norm=parts.QKNorm(eps) if read.flag("use_qk_norm") else None,
    )
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    experts, norm = corrected_experts(read, mlp), parts.RMSNorm(eps)
    dense = read.count("first_k_dense_replace", 1)
    layers = [
        parts.Layer(norm, attention, mlp if i < dense else experts)
        for i in range(dimensions.num_hidden_layers)
    ]
    return parts.read_decoder(read, norm, layers)


def corrected_experts(
    read: parts.ConfigReader,
    mlp: parts.GatedMLP,
    scale: float = 1.0,
    defaults: Mapping[str, int] | None = None,
    keys: tuple[str, str] = ("n_routed_experts", "n_shared_experts"),
) -> parts.SparseMoeBlock:
    """DeepSeek-V3's experts: sigmoid scores with correction biases, groups, shared experts."""
    chosen, met = keys
    read = read.renamed(chosen, "num_local_experts") if chosen == "n_routed_experts" else read
    sizes = {chosen: 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
    sizes |= defaults or {}
    num_experts, top_k, size = (read.integer(key, value) for key, value in sizes.items())
    parts.check_expert_counts(read, (chosen, num_experts), ("num_experts_per_tok", top_k))
    parts.refuse_balance_loss(read)
    inner = size * read.integer(met, 1)
    shared = replace(mlp.dimensions, intermediate_size=inner)
    scoring = parts.Scoring(
        sigmoid=True,
        normalized=read.flag("norm_topk_prob", True),
        least=1e-20,
        scale=scale,
        pairs=True,
    )
    return parts.SparseMoeBlock(
        mlp.dimensions.hidden_size,
        size,
        mlp.activation,
        num_experts,
        top_k,
        shared=parts.SharedExpert(replace(mlp, dimensions=shared, name="mlp.shared_experts")),
        choice=parts.Router(
            parts.read_groups(read, num_experts, top_k, scoring), correction=CORRECTION
        ),
    )
