"""Phi 1, 1.5 and 2 (Microsoft, 2023): parallel attention and MLP, biases, even in the head."""

from qlora_wgpu.families import parts

DROPOUTS = ("attention_dropout", "embd_pdrop", "resid_pdrop")


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Phi 2's dropout is ignored with a note."""
    dimensions = parts.Dimensions.read(read)
    eps = read.number("layer_norm_eps", 1e-5)
    of_heads = parts.QKLayerNorm(eps, names=("q_layernorm", "k_layernorm"), shared=True)
    attention = parts.Attention(
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim, default_partial=0.5),
        qkv_bias=True,
        o_bias=True,
        qk_norm=of_heads if read.flag("qk_layernorm") else None,
        output="dense",
    )
    activation = parts.read_activation(read, "gelu_new")
    mlp = parts.PlainMLP(dimensions, activation, bias=True, leaves=("fc1", "fc2"))
    norm = parts.LayerNorm(eps, bias=True)
    return parts.read_decoder(
        read,
        norm,
        parts.Layer(norm, attention, mlp, parts.PARALLEL),
        final_norm="final_layernorm",
        head_bias=True,
        notes=read.dropped(dict.fromkeys(DROPOUTS, 0.0)),
    )
