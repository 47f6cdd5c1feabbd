"""Command R and R+ (Cohere, 2024): parallel attention and MLP, LayerNorms, interleaved RoPE."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Norms have no biases; logits are scaled; R+ normalizes heads (``use_qk_norm``)."""
    dimensions = parts.Dimensions.read(read)
    rope = parts.read_rope(read.config, dimensions.head_dim, default_theta=500_000.0)
    eps = read.number("layer_norm_eps", 1e-5)
    attention = parts.read_attention(
        read,
        dimensions,
        rope,
        qk_norm=parts.QKLayerNorm(eps) if read.flag("use_qk_norm") else None,
        interleaved=True,
    )
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    norm = parts.LayerNorm(eps, bias=False)
    return parts.read_decoder(
        read,
        norm,
        parts.Layer(norm, attention, mlp, parts.PARALLEL),
        ties=True,
        pad_token_id=0,
        logit_scale=read.number("logit_scale", 0.0625),
    )
