"""Arcee's foundation models (2025): as Llama, with a plain MLP and squared ReLU."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    dimensions = parts.Dimensions.read(read)
    rope = parts.read_rope(read.config, dimensions.head_dim)
    attention = parts.read_attention(read, dimensions, rope)
    mlp = parts.PlainMLP(
        dimensions, parts.read_activation(read, "relu2"), bias=read.flag("mlp_bias")
    )
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    return parts.read_decoder(read, norm, parts.Layer(norm, attention, mlp))
