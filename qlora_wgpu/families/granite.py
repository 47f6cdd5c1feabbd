"""Granite 3 (IBM, 2024): as Llama, with multipliers."""

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    dimensions = parts.Dimensions.read(read)
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read), read.flag("mlp_bias"))
    return compose_with(read, dimensions, mlp, parts.read_rope(read.config, dimensions.head_dim))


def compose_with(
    read: parts.ConfigReader, dimensions: parts.Dimensions, mlp: parts.Half, rope: parts.Rope | None
) -> parts.Decoder:
    """Logits are divided by ``logits_scaling``; the other three multiply."""
    divisor = read.number("logits_scaling", 1.0)
    if divisor == 0:
        raise UnsupportedModelError("config.json: logits_scaling must not be 0")
    attention = parts.read_attention(
        read, dimensions, rope, scale=read.number("attention_multiplier", 1.0)
    )
    residual_scale = read.number("residual_multiplier", 1.0)
    if residual_scale != 1.0 and (
        attention.o_bias or (isinstance(mlp, parts.GatedMLP) and mlp.bias)
    ):
        raise UnsupportedModelError("config.json: residual_multiplier with biases is not supported")
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-6))
    layer = parts.Layer(norm, attention, mlp, residual_scale=residual_scale)
    multiplier = read.number("embedding_multiplier", 1.0)
    return parts.read_decoder(
        read,
        norm,
        layer,
        embedding_scale=multiplier,
        noise_scale=multiplier,
        logit_scale=1.0 / divisor,
    )
