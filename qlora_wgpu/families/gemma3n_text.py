"""Gemma 3n, text (Google, 2025): several residual streams, per-layer inputs, sparse activations."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts
from qlora_wgpu.families.gemma4_text import kind_of, kv_sources, tables_note

DEFAULTS = {
    "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384,
    "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 15, "laurel_rank": 64, "altup_num_inputs": 4,
}  # fmt: skip
"""Hugging Face's."""


def compose(read: parts.ConfigReader) -> parts.AltUpDecoder:
    """By default every fifth layer has full attention, and the first ten layers' gates are sparse.

    What is computed, and so trained, is what transformers computes in inference: only while it
    trains, it limits weights by ``altup_coef_clip``, within which those of published models are,
    and leaves adapters of ``correction_coefs`` out.
    """
    read = read.with_defaults(**DEFAULTS)
    read.no_dropout("attention_dropout")
    read.choice("use_bidirectional_attention", (None, False))
    activation = parts.read_activation(read, key="hidden_activation")
    sizes = _sizes(read)
    dimensions, eps = sizes[0], read.number("rms_norm_eps", 1e-6)
    count, bias = dimensions.num_hidden_layers, read.flag("attention_bias")
    near = read.number("rope_local_base_freq", 10_000.0)
    far, near_rope = parts.read_ropes_of_layers(read.config, dimensions.head_dim, 1e6, near)
    attention = parts.Attention(
        dimensions, far, qkv_bias=bias, o_bias=bias, qk_norm=parts.QKNorm(eps), scale=1.0,
        value_norm=eps,
    )  # fmt: skip
    windows = parts.layer_windows(read, [(i + 1) % 5 != 0 for i in range(count)])
    sources = kv_sources(read, windows)
    hidden_size = dimensions.hidden_size
    inputs = parts.PerLayerInputs(
        hidden_size,
        read.integer("hidden_size_per_layer_input"),
        read.integer("vocab_size_per_layer_input"),
        activation,
        eps,
    )
    if inputs.size % 2:
        raise UnsupportedModelError(
            f"config.json: hidden_size_per_layer_input {inputs.size} must be even"
        )
    altup, norm = _altup(read, hidden_size, eps), parts.RMSNorm(eps)
    laurel = parts.Laurel(hidden_size, read.integer("laurel_rank"), eps)
    layers = [
        parts.AltUpLayer(
            norm,
            replace(
                attention,
                window=window,
                rope=far if window is None else near_rope,
                shared=source != i,
            ),
            parts.GatedMLP(own, activation, deviations=_deviations(sparsity)),
            parts.PRE_AND_POST_NORM,
            kind=kind_of(window),
            keeps=source == i and sources.count(i) > 1,
            inputs=inputs,
            altup=altup,
            laurel=laurel,
        )
        for i, (window, source, own, sparsity) in enumerate(
            zip(windows, sources, sizes, _sparsities(read, count), strict=True)
        )
    ]
    return parts.AltUpDecoder(
        dimensions,
        # Of the sum of all streams instead of their mean.
        parts.RMSNorm(eps * altup.streams**2),
        layers=tuple(layers),
        tied=read.flag("tie_word_embeddings", True),
        pad_token_id=0,
        embedding_scale=math.sqrt(hidden_size),
        logit_softcap=read.softcap("final_logit_softcapping", 30.0),
        inputs=inputs,
        altup=altup,
        notes=tables_note(inputs, count),
    )


def _sizes(read: parts.ConfigReader) -> list[parts.Dimensions]:
    """The dimensions of each layer, whose MLPs may differ in size."""
    inner = read.config["intermediate_size"]
    if not isinstance(inner, Sequence) or isinstance(inner, str):
        dimensions = parts.Dimensions.read(read)
        return [dimensions] * dimensions.num_hidden_layers
    count = read.integer("num_hidden_layers")
    if len(inner) != count:
        raise UnsupportedModelError(
            f"config.json: intermediate_size must be one size, or one for each of the {count} "
            f"layers, got {len(inner)}"
        )
    return [
        parts.Dimensions.read(parts.ConfigReader({**read.config, "intermediate_size": size}))
        for size in inner
    ]


def _sparsities(read: parts.ConfigReader, layers: int) -> list[float]:
    """The share of each layer's gate that is dropped."""
    pattern: Any = read.config.get("activation_sparsity_pattern")
    if pattern is None:
        sparse = 10 if layers > 10 else 0
        return [0.95] * sparse + [0.0] * (layers - sparse)
    if (
        not isinstance(pattern, list)
        or len(pattern) != layers
        or any(type(share) not in (int, float) or not 0 <= share < 1 for share in pattern)
    ):
        raise UnsupportedModelError(
            "config.json: activation_sparsity_pattern must have a number from 0 to below 1 for "
            f"each of the {layers} layers, got {brief(pattern)}"
        )
    return pattern


def _deviations(sparsity: float) -> float | None:
    return NormalDist().inv_cdf(sparsity) if sparsity > 0 else None


def _altup(read: parts.ConfigReader, hidden_size: int, eps: float) -> parts.AltUp:
    streams, active = read.integer("altup_num_inputs"), read.count("altup_active_idx", 0)
    if not 2 <= streams <= parts.MOST_STREAMS or active >= streams:
        raise UnsupportedModelError(
            f"config.json: altup_num_inputs must be from 2 to {parts.MOST_STREAMS}, and "
            f"altup_active_idx less, got {streams} and {active}"
        )
    if read.config.get("altup_coef_clip") is not None:
        read.number("altup_coef_clip", 0.0)
    scales = read.flag("altup_correct_scale", True)
    return parts.AltUp(hidden_size, streams, active, eps, scales)
