"""DeepSeek-V3's architecture (2024) in sizes for one machine: Moonlight-16B-A3B."""

from qlora_wgpu.families import parts
from qlora_wgpu.families.glm4_moe import corrected_experts

SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """The first ``first_k_dense_replace`` layers are dense."""
    read.no_dropout("attention_dropout")
    read = read.renamed("qk_rope_head_dim", "head_dim")
    read = read.with_defaults(num_key_value_heads=128, n_group=8, topk_group=4)
    attention = parts.read_latent_attention(read, SIZES, q_rank=1536)
    dimensions = attention.dimensions
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    defaults = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
    experts = corrected_experts(read, mlp, 2.5, defaults)
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-6))
    dense = read.count("first_k_dense_replace", 3)
    layers = [
        parts.Layer(norm, attention, mlp if i < dense else experts)
        for i in range(dimensions.num_hidden_layers)
    ]
    return parts.read_decoder(read, norm, layers)
