"""Gemma 2 (Riviere et al., 2024): pre- and post-norms, sliding windows, softcaps."""

import math
from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import parts


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """By default, every other layer slides."""
    read = read.with_defaults(sliding_window=4096)
    read.choice("use_bidirectional_attention", (None, False))
    activation = parts.read_activation(read, "gelu_pytorch_tanh", "hidden_activation")
    dimensions = parts.Dimensions.read(read, head_dim=256)
    attention = parts.read_attention(
        read,
        dimensions,
        parts.read_rope(read.config, dimensions.head_dim),
        scale=read_score_scale(read),
        softcap=read.softcap("attn_logit_softcapping", 50.0),
    )
    mlp = parts.GatedMLP(dimensions, activation)
    norm = parts.RMSNorm(read.number("rms_norm_eps", 1e-6), offset=1.0)
    windows = parts.layer_windows(read, [i % 2 == 0 for i in range(dimensions.num_hidden_layers)])
    layers = [
        parts.Layer(norm, replace(attention, window=w), mlp, parts.PRE_AND_POST_NORM)
        for w in windows
    ]
    return parts.read_decoder(
        read,
        norm,
        layers,
        ties=True,
        pad_token_id=0,
        embedding_scale=math.sqrt(dimensions.hidden_size),
        logit_softcap=read.softcap("final_logit_softcapping", 30.0),
    )


def read_score_scale(read: parts.ConfigReader) -> float:
    scalar = read.number("query_pre_attn_scalar", 256.0)
    if scalar == 0:
        raise UnsupportedModelError("config.json: query_pre_attn_scalar must not be 0")
    return 1 / math.sqrt(scalar)
