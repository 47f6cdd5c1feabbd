"""ERNIE 4.5 as a mixture of experts (Baidu, 2025): ERNIE-4.5-21B-A3B and others."""

from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """As the dense models, with experts from ``moe_layer_start_index`` on."""
    read = read.renamed("moe_num_experts", "num_experts").renamed("moe_k", "num_experts_per_tok")
    read = read.with_defaults(num_key_value_heads=4)
    dimensions = parts.Dimensions.read(read)
    rope = parts.read_rope(read.config, dimensions.head_dim, default_theta=500_000.0)
    if read.flag("use_bias"):
        raise UnsupportedModelError(
            "config.json: use_bias = true is not supported, since lm_head would have a bias, too"
        )
    attention = parts.Attention(dimensions, rope, interleaved=True)
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    experts, norm = _experts(read, mlp), parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    layers = [
        parts.Layer(norm, attention, experts if sparse else mlp)
        for sparse in _sparse(read, dimensions.num_hidden_layers)
    ]
    return parts.read_decoder(
        read, norm, layers, ties=True, pad_token_id=0, balance=parts.read_balance_loss(read)
    )


def _experts(read: parts.ConfigReader, mlp: parts.GatedMLP) -> parts.SparseMoeBlock:
    num_experts, top_k = read.integer("moe_num_experts", 64), read.integer("moe_k", 6)
    parts.check_expert_counts(read, ("moe_num_experts", num_experts), ("moe_k", top_k))
    size = read.integer("moe_intermediate_size", 1536)
    count = read.count("moe_num_shared_experts", 2)
    shared = replace(mlp.dimensions, intermediate_size=count * size)
    least = read.number("moe_norm_min", 1e-12)
    return parts.SparseMoeBlock(
        mlp.dimensions.hidden_size,
        size,
        mlp.activation,
        num_experts,
        top_k,
        shared=parts.SharedExpert(replace(mlp, dimensions=shared, name="mlp.shared_experts"))
        if count
        else None,
        choice=parts.Router(
            parts.Scoring(sigmoid=False, normalized=True, least=least, at_least=True),
            correction="mlp.moe_statics.e_score_correction_bias",
            correction_rows=True,
        ),
    )


def _sparse(read: parts.ConfigReader, layers: int) -> list[bool]:
    first, every = read.count("moe_layer_start_index", 1), read.integer("moe_layer_interval", 1)
    last = read.config.get("moe_layer_end_index", -1)
    if type(last) is not int or not last >= -1:
        raise UnsupportedModelError(
            f"config.json: moe_layer_end_index must be a layer's number or -1, got {brief(last)}"
        )
    last = layers - 1 if last == -1 else last
    return [(i + 1) % every == 0 and first <= i <= last for i in range(layers)]
