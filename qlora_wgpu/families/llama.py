"""Llama (Touvron et al., 2023; Grattafiori et al., 2024): Llama 1 to 3, TinyLlama, SmolLM."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    dimensions = parts.Dimensions.read(read)
    rope = parts.read_rope(read.config, dimensions.head_dim)
    attention = parts.read_attention(read, dimensions, rope)
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read), bias=read.flag("mlp_bias"))
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-6))
    return parts.read_decoder(read, norm, parts.Layer(norm, attention, mlp))
