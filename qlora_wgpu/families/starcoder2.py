"""StarCoder 2 (Lozhkov et al., 2024): LayerNorms, biases, a window and a plain MLP."""

from qlora_wgpu.families import parts

DROPOUTS = ("attention_dropout", "residual_dropout", "embedding_dropout")


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Nonzero dropouts are ignored with a note."""
    dimensions = parts.Dimensions.read(read)
    bias = read.flag("use_bias", True)
    attention = parts.Attention(
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim),
        window=read.optional_integer("sliding_window"),
        qkv_bias=bias,
        o_bias=bias,
    )
    activation = parts.read_activation(read, "gelu_pytorch_tanh")
    mlp = parts.PlainMLP(dimensions, activation, bias, leaves=("c_fc", "c_proj"))
    norm = parts.LayerNorm(read.number("norm_epsilon", 1e-5), bias=True)
    return parts.read_decoder(
        read,
        norm,
        parts.Layer(norm, attention, mlp),
        ties=True,
        notes=read.dropped(dict.fromkeys(DROPOUTS, 0.0)),
    )
