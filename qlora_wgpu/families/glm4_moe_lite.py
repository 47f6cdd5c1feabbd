"""GLM-4.7-Flash (Z.ai, 2026): latent attention and experts as in DeepSeek-V3."""

from qlora_wgpu.families import parts
from qlora_wgpu.families.glm4_moe import corrected_experts

SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """By default, only the first layer is dense."""
    read.no_dropout("attention_dropout")
    read = read.renamed("qk_rope_head_dim", "head_dim").with_defaults(num_key_value_heads=20)
    attention = parts.read_latent_attention(read, SIZES, q_rank=768)
    dimensions = attention.dimensions
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    defaults = {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}
    experts = corrected_experts(read, mlp, 1.8, defaults)
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    layers = [
        parts.Layer(norm, attention, experts if sparse else mlp)
        for sparse in _sparse(read, dimensions.num_hidden_layers)
    ]
    return parts.read_decoder(read, norm, layers)


def _sparse(read: parts.ConfigReader, layers: int) -> list[bool]:
    if read.config.get("mlp_layer_types") is None:
        return [i > 0 for i in range(layers)]
    types = read.layer_kinds("mlp_layer_types", ("dense", "sparse"), layers)
    return [kind == "sparse" for kind in types]
