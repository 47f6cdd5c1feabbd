"""StableLM 2 and 3B (Bellagente et al., 2024): LayerNorms and partial RoPE."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Attention and MLP are parallel if ``use_parallel_residual``; 12B also normalizes heads."""
    read.no_dropout("attention_dropout", "hidden_dropout")
    dimensions = parts.Dimensions.read(read)
    rope = parts.read_rope(read.config, dimensions.head_dim, default_partial=0.25)
    eps = read.number("layer_norm_eps", 1e-5)
    per_head = parts.QKLayerNorm(eps, names=("q_layernorm.norms.*", "k_layernorm.norms.*"))
    attention = parts.Attention(
        dimensions,
        rope,
        qkv_bias=read.flag("use_qkv_bias"),
        qk_norm=per_head if read.flag("qk_layernorm") else None,
    )
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read))
    norm = parts.LayerNorm(eps, bias=True)
    order = parts.PARALLEL if read.flag("use_parallel_residual") else parts.PRE_NORM
    return parts.read_decoder(read, norm, parts.Layer(norm, attention, mlp, order))
