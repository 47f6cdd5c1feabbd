"""Gemma 3, text (Kamath et al., 2025): as Gemma 2, with normalized q and k and two rotations."""

import math
from dataclasses import replace

from qlora_wgpu.families import parts
from qlora_wgpu.families.gemma2 import read_score_scale


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """By default, five of six layers slide; these have their own RoPE base."""
    read = read.with_defaults(sliding_window=4096)
    read.choice("use_bidirectional_attention", (None, False))
    activation = parts.read_activation(read, "gelu_pytorch_tanh", "hidden_activation")
    dimensions = parts.Dimensions.read(read, head_dim=256)
    eps = read.number("rms_norm_eps", 1e-6)
    far, near = _ropes(read, dimensions.head_dim)
    attention = parts.read_attention(
        read, dimensions, far, qk_norm=parts.QKNorm(eps), scale=read_score_scale(read)
    )
    sliding = replace(attention, rope=near)
    mlp, norm = parts.GatedMLP(dimensions, activation), parts.RMSNorm(eps, offset=1.0)
    attentions = [
        attention if window is None else replace(sliding, window=window)
        for window in parts.periodic_windows(read, dimensions.num_hidden_layers, every=6)
    ]
    layers = [parts.Layer(norm, each, mlp, parts.PRE_AND_POST_NORM) for each in attentions]
    return parts.read_decoder(
        read,
        norm,
        layers,
        ties=True,
        pad_token_id=0,
        embedding_scale=math.sqrt(dimensions.hidden_size),
        logit_softcap=read.softcap("final_logit_softcapping"),
        notes=_notes(read),
    )


def _notes(read: parts.ConfigReader) -> tuple[str, ...]:
    """Norms of queries and keys replaced Gemma 2's softcap; transformers also ignores it."""
    bound = read.softcap("attn_logit_softcapping")
    if bound is None:
        return ()
    return (f"config.json: attn_logit_softcapping = {bound} is ignored, as in transformers",)


def _ropes(read: parts.ConfigReader, head_dim: int) -> tuple[parts.Rope, parts.Rope]:
    near = read.number("rope_local_base_freq", 10_000.0)
    return parts.read_ropes_of_layers(read.config, head_dim, 1_000_000.0, near)
