"""StarCoder 2 (Lozhkov et al., 2024): LayerNorms, biases, a window and a plain MLP."""

from __future__ import annotations

from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import PlainMLP, read_activation
from qlora_wgpu.families.parts.norm import LayerNorm
from qlora_wgpu.families.parts.rope import read_rope

DROPOUTS = ("attention_dropout", "residual_dropout", "embedding_dropout")


def compose(read: ConfigReader) -> Decoder:
    """StarCoder 2, without its dropouts; a note says so where they are not zero."""
    dimensions = Dimensions.read(read)
    bias = read.flag("use_bias", True)
    attention = Attention(
        dimensions,
        read_rope(read.config, dimensions.head_dim),
        window=read.optional_integer("sliding_window"),
        qkv_bias=bias,
        o_bias=bias,
    )
    activation = read_activation(read, "gelu_pytorch_tanh")
    mlp = PlainMLP(dimensions, activation, bias, leaves=("c_fc", "c_proj"))
    norm = LayerNorm(read.number("norm_epsilon", 1e-5), bias=True)
    return Decoder(
        dimensions,
        norm,
        layers=(Layer(norm, attention, mlp),) * dimensions.num_hidden_layers,
        tied=read.flag("tie_word_embeddings", True),
        notes=read.dropped(dict.fromkeys(DROPOUTS, 0.0)),
    )


FAMILY = DecoderFamily(compose)
