"""Nemotron 4 and Minitron (NVIDIA, 2024): LayerNorms of 1 + weight, squared ReLU."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """By default, half of each head is rotated."""
    dimensions = parts.Dimensions.read(read)
    rope = parts.read_rope(read.config, dimensions.head_dim, default_partial=0.5)
    attention = parts.read_attention(read, dimensions, rope)
    mlp = parts.PlainMLP(
        dimensions, parts.read_activation(read, "relu2"), bias=read.flag("mlp_bias")
    )
    norm = parts.LayerNorm(read.number("norm_eps", 1e-5), bias=True, offset=1.0)
    return parts.read_decoder(read, norm, parts.Layer(norm, attention, mlp))
