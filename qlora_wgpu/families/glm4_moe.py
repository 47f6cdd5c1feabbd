"""GLM-4.5, 4.6 and 4.7 as mixtures of experts (Zeng et al., 2025): GLM-4.5-Air and others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qlora_wgpu.families.parts.attention import Attention, QKNorm
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import GatedMLP, read_activation
from qlora_wgpu.families.parts.moe import (
    Experts,
    Router,
    Scoring,
    SharedExpert,
    check_expert_counts,
    read_groups,
    refuse_balance_loss,
)
from qlora_wgpu.families.parts.norm import RMSNorm
from qlora_wgpu.families.parts.rope import read_rope

CORRECTION = "mlp.gate.e_score_correction_bias"


def compose(read: ConfigReader) -> Decoder:
    """The first layers are dense; half of each head is rotated."""
    read.no_dropout("attention_dropout")
    read = read.with_defaults(num_key_value_heads=8)
    dimensions = Dimensions.read(read)
    eps = read.number("rms_norm_eps", 1e-5)
    attention = Attention(
        dimensions,
        read_rope(read.config, dimensions.head_dim, default_partial=0.5),
        qkv_bias=read.flag("attention_bias"),
        qk_norm=QKNorm(eps) if read.flag("use_qk_norm") else None,
    )
    mlp = GatedMLP(dimensions, read_activation(read))
    experts, norm = corrected_experts(read, mlp), RMSNorm(eps)
    dense = read.count("first_k_dense_replace", 1)
    return Decoder(
        dimensions,
        norm,
        layers=tuple(
            Layer(norm, attention, mlp if i < dense else experts)
            for i in range(dimensions.num_hidden_layers)
        ),
        tied=read.flag("tie_word_embeddings"),
    )


def corrected_experts(
    read: ConfigReader,
    mlp: GatedMLP,
    scale: float = 1.0,
    defaults: Mapping[str, int] | None = None,
    keys: tuple[str, str] = ("n_routed_experts", "n_shared_experts"),
) -> Experts:
    """DeepSeek-V3's mixture: sigmoid scores, corrected for the choice, groups, shared experts.

    Args:
        read: The config.json.
        mlp: The MLP of dense layers.
        scale: ``routed_scaling_factor``, where no key says it.
        defaults: Of the keys of sizes, where they are not GLM-4.5's.
        keys: Of the numbers of experts that are chosen, and that every token meets.
    """
    chosen, met = keys
    read = read.renamed(chosen, "num_local_experts") if chosen == "n_routed_experts" else read
    sizes = {chosen: 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
    sizes |= defaults or {}
    num_experts, top_k, size = (read.integer(key, value) for key, value in sizes.items())
    check_expert_counts(read, (chosen, num_experts), ("num_experts_per_tok", top_k))
    refuse_balance_loss(read)
    inner = size * read.integer(met, 1)
    shared = replace(mlp.dimensions, intermediate_size=inner)
    scoring = Scoring(
        sigmoid=True,
        normalized=read.flag("norm_topk_prob", True),
        least=1e-20,
        scale=scale,
        pairs=True,
    )
    return Experts(
        mlp.dimensions.hidden_size,
        size,
        mlp.activation,
        num_experts,
        top_k,
        shared=SharedExpert(replace(mlp, dimensions=shared, name="mlp.shared_experts")),
        choice=Router(read_groups(read, num_experts, top_k, scoring), correction=CORRECTION),
    )


FAMILY = DecoderFamily(compose)
