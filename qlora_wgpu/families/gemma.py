"""Gemma (Mesnard et al., 2024): GeGLU, norms of 1 + weight and scaled embeddings."""

import math

from qlora_wgpu.families import parts

_IGNORED = (
    "config.json: hidden_activation = gelu is ignored, as in transformers 5: MLPs use "
    "hidden_act, gelu_pytorch_tanh"
)


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Early configurations with ``gelu`` mean its tanh form, as in Hugging Face.

    transformers 4 preferred ``hidden_activation`` to ``hidden_act``; transformers 5 ignores it.
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
