"""Nemotron-H, Nemotron 3 (NVIDIA, 2025): layers of Mamba 2, attention, an MLP or experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts
from qlora_wgpu.families.bamba import SILU

MAMBA, ATTENTION, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
LEGACY = {"mamba": MAMBA, "attention": ATTENTION}
PATTERN = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS}
# Older names of Mamba's keys, which win over the others.
RENAMED = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
}
MIXED = parts.ResidualOrder(before_attention="norm")
WIDENED = parts.ResidualOrder(before_mlp="norm")


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """A layer has one norm and one part, both called alike in all kinds of layers."""
    read.no_dropout("attention_dropout")
    read = _renamed(read)
    kinds = _kinds(read)
    defaults = {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504}
    read = read.with_defaults(num_attention_heads=32, **defaults)
    whole = parts.ConfigReader({**read.config, "num_hidden_layers": len(kinds)})
    dimensions = parts.Dimensions.read(whole)
    norm = parts.RMSNorm(read.number("layer_norm_epsilon", 1e-5))
    activation = parts.read_activation(read, "relu2", "mlp_hidden_act")
    mlp = parts.PlainMLP(dimensions, activation, read.flag("mlp_bias"), name="mixer")
    layers = {MLP: parts.Layer(norm, None, mlp, WIDENED)}
    if MAMBA in kinds:
        layers[MAMBA] = parts.Layer(norm, _mamba(read, dimensions, norm.eps), None, MIXED)
    if ATTENTION in kinds:
        # Attention has neither positions nor biases.
        attention = parts.Attention(dimensions, None, name="mixer")
        layers[ATTENTION] = parts.Layer(norm, attention, None, MIXED)
    if EXPERTS in kinds:
        layers[EXPERTS] = parts.Layer(norm, None, _experts(read, mlp), WIDENED)
    return parts.Decoder(
        dimensions,
        norm,
        tuple(layers[kind] for kind in kinds),
        tied=False,  # transformers never ties them
        pads=False,
        stored_prefixes=(("model.", "backbone."), ("model.", "")),
        embedding="embeddings",
        final_norm="norm_f",
    )


def _renamed(read: parts.ConfigReader) -> parts.ConfigReader:
    given = {key: read.config[old] for old, key in RENAMED.items() if old in read.config}
    read = parts.ConfigReader({**read.config, **given})
    return read.renamed("n_routed_experts", "num_local_experts")


def _kinds(read: parts.ConfigReader) -> list[str]:
    """What each layer is."""
    kinds = parts.read_block_types(read, PATTERN.values(), LEGACY)
    if kinds is not None:
        return kinds
    return _by_letters(read.config.get("hybrid_override_pattern", "ME*-"))


def _by_letters(pattern: Any) -> list[str]:
    if not isinstance(pattern, str) or not pattern or not set(pattern) <= set(PATTERN):
        raise UnsupportedModelError(
            f"config.json: hybrid_override_pattern must be a string of {', '.join(PATTERN)}, "
            f"got {brief(pattern)}"
        )
    return [PATTERN[letter] for letter in pattern]


def _mamba(read: parts.ConfigReader, dimensions: parts.Dimensions, eps: float) -> parts.Mamba:
    # The convolution applies this activation, and supports SiLU alone.
    read.choice("mamba_hidden_act", SILU, "silu")
    sizes = {
        "mamba_num_heads": read.integer("mamba_num_heads", 128),
        "mamba_head_dim": read.integer("mamba_head_dim", 64),
        "n_groups": read.integer("n_groups", 8),
        "ssm_state_size": read.integer("ssm_state_size", 128),
    }
    bias = read.flag("use_bias")
    return parts.Mamba(
        dimensions,
        parts.MambaSizes.checked(sizes),
        read.integer("conv_kernel", 4),
        eps,
        (read.number("time_step_min", 0.001), None),
        conv_bias=read.flag("use_conv_bias", True),
        in_bias=bias,
        out_bias=bias,
        adapts_output=False,
        name="mixer",
    )


def _experts(read: parts.ConfigReader, mlp: parts.PlainMLP) -> parts.SparseMoeBlock:
    """DeepSeek-V3's routing to experts without gates, next to a shared one."""
    parts.refuse_balance_loss(read)
    count, top_k = read.integer("n_routed_experts", 8), read.integer("num_experts_per_tok", 2)
    parts.check_expert_counts(read, ("n_routed_experts", count), ("num_experts_per_tok", top_k))
    size = read.integer("moe_shared_expert_intermediate_size", 7688)
    shared = replace(mlp.dimensions, intermediate_size=size)
    latent = read.optional_integer("moe_latent_size")
    scoring = parts.Scoring(
        sigmoid=True, normalized=read.flag("norm_topk_prob", True), least=1e-20, pairs=True
    )
    return parts.SparseMoeBlock(
        mlp.dimensions.hidden_size,
        read.integer("moe_intermediate_size", 7688),
        mlp.activation,
        count,
        top_k,
        name="mixer",
        leaves=mlp.leaves,
        fused=False,
        shared=parts.SharedExpert(replace(mlp, dimensions=shared, name="mixer.shared_experts")),
        choice=parts.Router(
            parts.read_groups(read, count, top_k, scoring),
            correction="mixer.gate.e_score_correction_bias",
        ),
        latent=None if latent is None else parts.LatentExperts(latent, mlp.bias),
    )
