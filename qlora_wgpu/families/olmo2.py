"""OLMo 2 (Walsh et al., 2025): post-norms, and norms over all of q and of k."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Attention and MLP read the residual stream without a norm."""
    dimensions = parts.Dimensions.read(read)
    rope = parts.read_rope(read.config, dimensions.head_dim)
    eps = read.number("rms_norm_eps", 1e-5)
    qk_norm = parts.QKNorm(eps, per_head=False)
    attention = parts.read_attention(read, dimensions, rope, qk_norm=qk_norm)
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    norm = parts.RMSNorm(eps)
    return parts.read_decoder(
        read, norm, parts.Layer(norm, attention, mlp, parts.POST_NORM), pad_token_id=1
    )
