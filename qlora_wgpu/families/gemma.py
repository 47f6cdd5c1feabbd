"""Gemma (Mesnard et al., 2024): GeGLU, norms of 1 + weight and scaled embeddings."""

import math

from qlora_wgpu.families import parts

_IGNORED = (
    "hidden_activation = gelu of config.json is not applied, as in transformers 5: MLPs have "
    "hidden_act, gelu_pytorch_tanh"
)


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Early configurations say ``gelu`` and mean its tanh form, as Hugging Face reads them.

    ``hidden_activation`` was read before ``hidden_act`` by transformers 4, and is not any more.
    """
    read.choice("use_bidirectional_attention", (None, False))
    read.choice("hidden_act", ("gelu_pytorch_tanh", "gelu"), "gelu_pytorch_tanh")
    named = read.choice("hidden_activation", (None, "gelu_pytorch_tanh", "gelu"))
    dimensions = parts.Dimensions.read(read, head_dim=256)
    rope = parts.read_rope(read.config, dimensions.head_dim)
    attention = parts.read_attention(read, dimensions, rope)
    mlp = parts.GatedMLP(dimensions, "gelu_pytorch_tanh")
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-6), offset=1.0)
    return parts.read_decoder(
        read,
        norm,
        parts.Layer(norm, attention, mlp),
        ties=True,
        pad_token_id=0,
        embedding_scale=math.sqrt(dimensions.hidden_size),
        notes=() if named != "gelu" else (_IGNORED,),
    )
