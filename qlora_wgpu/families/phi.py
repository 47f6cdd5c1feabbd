"""Phi 1, 1.5 and 2 (Microsoft, 2023): both halves from one norm, and biases, even of the head."""

from __future__ import annotations

from qlora_wgpu.families.parts.attention import Attention, QKLayerNorm
from qlora_wgpu.families.parts.config import ConfigReader, Dimensions
from qlora_wgpu.families.parts.decoder import PARALLEL, Decoder, DecoderFamily, Layer
from qlora_wgpu.families.parts.mlp import PlainMLP, read_activation
from qlora_wgpu.families.parts.norm import LayerNorm
from qlora_wgpu.families.parts.rope import read_rope

DROPOUTS = ("attention_dropout", "embd_pdrop", "resid_pdrop")


def compose(read: ConfigReader) -> Decoder:
    """Phi 2 was trained with a dropout: it is left out, and a note says so."""
    dimensions = Dimensions.read(read)
    eps = read.number("layer_norm_eps", 1e-5)
    of_heads = QKLayerNorm(eps, names=("q_layernorm", "k_layernorm"), shared=True)
    attention = Attention(
        dimensions,
        read_rope(read.config, dimensions.head_dim, default_partial=0.5),
        qkv_bias=True,
        o_bias=True,
        qk_norm=of_heads if read.flag("qk_layernorm") else None,
        output="dense",
    )
    activation = read_activation(read, "gelu_new")
    mlp = PlainMLP(dimensions, activation, bias=True, leaves=("fc1", "fc2"))
    norm = LayerNorm(eps, bias=True)
    return Decoder(
        dimensions,
        norm,
        layers=(Layer(norm, attention, mlp, PARALLEL),) * dimensions.num_hidden_layers,
        tied=read.flag("tie_word_embeddings"),
        final_norm="final_layernorm",
        head_bias=True,
        notes=read.dropped(dict.fromkeys(DROPOUTS, 0.0)),
    )


FAMILY = DecoderFamily(compose)
