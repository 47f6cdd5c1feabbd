"""GLM-4 (0414): pre- and post-norms, interleaved RoPE, gate and up fused."""

from qlora_wgpu.families import parts

ORDER = parts.ResidualOrder(
    before_attention="input_layernorm",
    after_attention="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_mlp_layernorm",
)


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """By default, half of each head is rotated, and q, k and v have biases."""
    read.no_dropout("attention_dropout")
    dimensions = parts.Dimensions.read(read, head_dim=128)
    attention = parts.Attention(
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim, default_partial=0.5),
        qkv_bias=read.flag("attention_bias", True),
        interleaved=True,
    )
    mlp = parts.FusedGatedMLP(dimensions, parts.read_activation(read))
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1.5625e-7))
    return parts.read_decoder(
        read, norm, parts.Layer(norm, attention, mlp, ORDER), pad_token_id=151_329
    )
