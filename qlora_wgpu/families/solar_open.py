"""Solar Open (Upstage, 2026): GLM-4.5's experts in every layer, with plain attention."""

from qlora_wgpu.families import parts
from qlora_wgpu.families.glm4_moe import corrected_experts

THETA = 1_000_000.0


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """``attention_bias`` gives biases to q, k and v; no layer has an MLP of its own."""
    read.no_dropout("attention_dropout")
    read = read.with_defaults(num_key_value_heads=8, head_dim=128)
    read = parts.ConfigReader({**read.config, "intermediate_size": 1})
    dimensions = parts.Dimensions.read(read)
    attention = parts.Attention(
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim, default_theta=THETA),
        qkv_bias=read.flag("attention_bias"),
    )
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    experts = corrected_experts(read, mlp, 1.0, {"moe_intermediate_size": 1280})
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    return parts.read_decoder(read, norm, parts.Layer(norm, attention, experts))
