"""ERNIE 4.5, dense (Baidu, 2025): as Llama, with interleaved RoPE."""

from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """One key sets the biases of all layers."""
    read = read.with_defaults(num_key_value_heads=2, head_dim=128)
    dimensions = parts.Dimensions.read(read)
    rope = parts.read_rope(read.config, dimensions.head_dim, default_theta=500_000.0)
    bias = read.flag("use_bias")
    attention = parts.Attention(dimensions, rope, qkv_bias=bias, o_bias=bias, interleaved=True)
    mlp = parts.GatedMLP(dimensions, parts.read_activation(read), bias)
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-5))
    return parts.read_decoder(
        read, norm, parts.Layer(norm, attention, mlp), ties=True, pad_token_id=0
    )
