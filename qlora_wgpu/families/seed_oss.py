"""Seed-OSS (ByteDance, 2025): as Llama, with biases of q, k and v."""

from qlora_wgpu.families import parts

DROPOUTS = ("attention_dropout", "residual_dropout")


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Nonzero dropouts are ignored with a note."""
    read = read.with_defaults(num_key_value_heads=8, head_dim=128)
    dimensions = parts.Dimensions.read(read)
    attention = parts.Attention(
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim),
        qkv_bias=read.flag("attention_bias", True),
        o_bias=read.flag("attention_out_bias"),
    )
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read), read.flag("mlp_bias"))
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-6))
    return parts.read_decoder(
        read,
        norm,
        parts.Layer(norm, attention, mlp),
        pad_token_id=1,
        notes=read.dropped(dict.fromkeys(DROPOUTS, 0.1)),
    )
