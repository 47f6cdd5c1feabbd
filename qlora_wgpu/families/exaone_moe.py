"""EXAONE as mixtures of experts (LG AI Research, 2026): K-EXAONE."""

from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import parts
from qlora_wgpu.families.exaone4 import read_attentions
from qlora_wgpu.families.glm4_moe import corrected_experts

SIZES = {"num_experts": 64, "moe_intermediate_size": 1024}


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """EXAONE 4's attention with pre-norms; the first layers are dense."""
    read = read.with_defaults(sliding_window=4096, num_key_value_heads=32)
    dimensions = parts.Dimensions.read(read)
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    experts = corrected_experts(read, mlp, 2.5, SIZES, ("num_experts", "num_shared_experts"))
    assert experts.choice is not None
    choice = replace(experts.choice, correction="mlp.e_score_correction_bias")
    experts = replace(experts, choice=choice)
    attentions = read_attentions(read, dimensions, norm.eps)
    layers = [
        parts.Layer(norm, attention, experts if sparse else mlp)
        for attention, sparse in zip(attentions, _sparse(read, len(attentions)), strict=True)
    ]
    return parts.read_decoder(read, norm, layers, pad_token_id=0)


def _sparse(read: parts.ConfigReader, layers: int) -> list[bool]:
    types = read.config.get("mlp_layer_types")
    if types is None:
        return [i >= read.count("first_k_dense_replace", 1) for i in range(layers)]
    if not parts.name_kinds(types, ("dense", "sparse"), layers):
        raise UnsupportedModelError(
            f"config.json: mlp_layer_types must be 'dense' or 'sparse' for each of {layers} layers"
        )
    return [kind == "sparse" for kind in types]
