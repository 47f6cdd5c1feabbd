"""Gemma 4, text (Google, 2026): heads of two sizes, shared keys and values, per-layer inputs."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts
from qlora_wgpu.limits import MIB

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATION = "gelu_pytorch_tanh"
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""Hugging Face's defaults."""
DEFAULTS = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 0, "rope_parameters": ROPES,
}  # fmt: skip


def compose(read: parts.ConfigReader) -> parts.SharingDecoder:
    """Full-attention layers have heads of another size; the last layers may share K and V."""
    read = read.with_defaults(**DEFAULTS)
    read.no_dropout("attention_dropout")
    read.choice("use_bidirectional_attention", (None, "vision"))  # which only concerns images
    read.choice("hidden_activation", (ACTIVATION,), ACTIVATION)
    dimensions = parts.Dimensions.read(read)
    eps, count = read.number("rms_norm_eps", 1e-6), dimensions.num_hidden_layers
    windows = _windows(read, count)
    attentions = _attentions(read, dimensions, windows, eps)
    sources = kv_sources(read, windows)
    inputs, mixture = _inputs(read, dimensions, eps), _mixture(read, dimensions, eps)
    norm, wide = parts.RMSNorm(eps), 2 if read.flag("use_double_wide_mlp") else 1
    layers = []
    for i, (window, source) in enumerate(zip(windows, sources, strict=True)):
        shared = source != i
        size = dimensions.intermediate_size * (wide if shared else 1)
        layers.append(
            parts.SharingLayer(
                norm,
                replace(attentions[kind_of(window)], window=window, shared=shared),
                parts.GatedMLP(replace(dimensions, intermediate_size=size), ACTIVATION),
                parts.PRE_AND_POST_NORM,
                kind=kind_of(window),
                keeps=not shared and sources.count(i) > 1,
                inputs=inputs,
                mixture=mixture,
            )
        )
    return parts.SharingDecoder(
        dimensions,
        norm,
        layers=tuple(layers),
        tied=read.flag("tie_word_embeddings", True),
        pad_token_id=0,
        embedding_scale=math.sqrt(dimensions.hidden_size),
        logit_softcap=read.softcap("final_logit_softcapping"),
        inputs=inputs,
        notes=tables_note(inputs, count),
    )


def tables_note(inputs: parts.PerLayerInputs | None, layers: int) -> tuple[str, ...]:
    if inputs is None:
        return ()
    nbytes = 2 * inputs.vocab_size * inputs.size * layers
    return (
        f"the per-layer embeddings ({nbytes / MIB:,.0f} MiB in bfloat16) stay in host memory or "
        "in their file: only the rows of a micro-batch's tokens are uploaded",
    )


def kind_of(window: int | None) -> str:
    return FULL if window is None else SLIDING


def _windows(read: parts.ConfigReader, layers: int) -> tuple[int | None, ...]:
    """The layers' windows; the last layer has full attention, whatever ``layer_types`` says."""
    types = read.config.get("layer_types")
    if types is None:
        types = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(layers)]
    if isinstance(types, list) and types:
        types = [*types[:-1], FULL if types[-1] == SLIDING else types[-1]]
    return parts.layer_windows(
        parts.ConfigReader({**read.config, "layer_types": types}), [False] * layers
    )


def kv_sources(read: parts.ConfigReader, windows: tuple[int | None, ...]) -> list[int]:
    """The layer whose keys and values each layer uses: itself, or the last of its kind."""
    shared = read.config["num_kv_shared_layers"]
    if type(shared) is not int or not 0 <= shared < len(windows):
        raise UnsupportedModelError(
            f"config.json: num_kv_shared_layers must be from 0 to {len(windows) - 1}, less than "
            f"the number of layers, got {brief(shared)}"
        )
    first = len(windows) - shared
    own = {kind_of(window): i for i, window in enumerate(windows[:first])}
    missing = {kind_of(window) for window in windows} - own.keys()
    if shared and missing:
        raise UnsupportedModelError(
            f"config.json: num_kv_shared_layers = {shared} leaves no layer of type "
            f"{missing.pop()} with keys and values of its own"
        )
    return [i if i < first else own[kind_of(window)] for i, window in enumerate(windows)]


def _attentions(
    read: parts.ConfigReader,
    dimensions: parts.Dimensions,
    windows: tuple[int | None, ...],
    eps: float,
) -> dict[str, parts.Attention]:
    """Attention of each kind of layer; scores are not scaled, since heads are normalized."""
    keys_as_values = read.flag("attention_k_eq_v")
    bias = read.flag("attention_bias")
    sizes = {SLIDING: dimensions, FULL: _global_dimensions(read, dimensions, windows)}
    return {
        kind: parts.Attention(
            own,
            _rope(read, kind, own.head_dim),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=parts.QKNorm(eps),
            scale=1.0,
            value_norm=eps,
            keys_as_values=keys_as_values and kind == FULL,
        )
        for kind, own in sizes.items()
        if kind in map(kind_of, windows)
    }


def _global_dimensions(
    read: parts.ConfigReader, dimensions: parts.Dimensions, windows: tuple[int | None, ...]
) -> parts.Dimensions:
    """Dimensions of full-attention layers, by their own keys or by a list of these layers."""
    heads = read.config.get("num_global_key_value_heads")
    own = {"head_dim": read.config.get("global_head_dim", 512)}
    if heads is not None and read.flag("attention_k_eq_v"):
        own["num_key_value_heads"] = heads
    if "per_layer_config" in read.config:
        own = _listed(read.config["per_layer_config"], windows)
    if None in own.values():
        raise UnsupportedModelError("config.json: global_head_dim must not be null")
    return parts.Dimensions.read(parts.ConfigReader({**read.config, **own}))


def _listed(listed: Any, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """``per_layer_config`` of the full-attention layers; no other layer may have an entry."""
    numbers = {str(i) for i, window in enumerate(windows) if window is None}
    if not isinstance(listed, Mapping) or set(map(str, listed)) != numbers:
        raise UnsupportedModelError(
            "config.json: per_layer_config must have an entry for each full_attention layer, "
            "and for no other"
        )
    entries = list(listed.values())
    keys = {"head_dim", "num_key_value_heads"}
    if any(not isinstance(e, Mapping) or not set(e) <= keys or e != entries[0] for e in entries):
        raise UnsupportedModelError(
            f"config.json: per_layer_config must have the same {' and '.join(sorted(keys))} for "
            "all layers, and nothing else"
        )
    return dict(entries[0]) if entries else {}


def _rope(read: parts.ConfigReader, kind: str, head_dim: int) -> parts.Rope:
    """RoPE of a kind of layer; the proportional one does not rotate the slowest pairs."""
    if "rope_scaling" in read.config:
        raise UnsupportedModelError(
            "config.json: rope_scaling is not supported (Gemma 4 uses rope_parameters)"
        )
    ropes = read.config["rope_parameters"]
    ropes = ROPES if ropes is None else ropes
    entry: Any = ropes.get(kind) if isinstance(ropes, Mapping) else None
    if not isinstance(entry, Mapping) or not parts.is_above_zero(entry.get("rope_theta")):
        raise UnsupportedModelError(
            f"config.json: rope_parameters must have {kind} with a rope_theta above zero"
        )
    named = entry.get("rope_type", "default")
    if named == "default":
        return parts.read_rope({"rope_parameters": {"rope_theta": entry["rope_theta"]}}, head_dim)
    share, factor = entry.get("partial_rotary_factor", 1.0), entry.get("factor", 1.0)
    if named != "proportional" or not parts.is_above_zero(factor) or not _is_share(share):
        raise UnsupportedModelError(
            f"config.json: in rope_parameters' {kind}, rope_type must be 'default' or "
            f"'proportional' with a partial_rotary_factor from 0 to 1, got {brief(dict(entry))}"
        )
    turned = np.arange(0, 2 * int(share * head_dim // 2), 2, dtype=np.float32)
    frequencies = np.zeros(head_dim // 2, np.float32)
    base = np.float32(entry["rope_theta"])
    frequencies[: len(turned)] = np.float32(1.0) / base ** (turned / np.float32(head_dim))
    frequencies /= np.float32(factor)
    return parts.Rope(head_dim, lambda length: frequencies)


def _is_share(share: Any) -> bool:
    return share == 0 or (parts.is_above_zero(share) and share <= 1)


def _inputs(
    read: parts.ConfigReader, dimensions: parts.Dimensions, eps: float
) -> parts.PerLayerInputs | None:
    """Each layer's own input of every token; None if its size is 0 or null."""
    if not read.config["hidden_size_per_layer_input"]:
        return None
    size = read.integer("hidden_size_per_layer_input")
    rows = read.integer("vocab_size_per_layer_input")
    if size % 2 or rows < dimensions.vocab_size:
        raise UnsupportedModelError(
            f"config.json: hidden_size_per_layer_input {size} must be even, and "
            f"vocab_size_per_layer_input {rows} at least vocab_size {dimensions.vocab_size}"
        )
    return parts.PerLayerInputs(dimensions.hidden_size, size, rows, ACTIVATION, eps)


def _mixture(
    read: parts.ConfigReader, dimensions: parts.Dimensions, eps: float
) -> parts.MixtureBeside | None:
    if not read.flag("enable_moe_block"):
        return None
    count, top = read.integer("num_experts"), read.integer("top_k_experts")
    if top > count:
        raise UnsupportedModelError(f"config.json: top_k_experts {top} exceeds num_experts {count}")
    inner = read.integer("moe_intermediate_size")
    return parts.MixtureBeside(dimensions.hidden_size, inner, ACTIVATION, count, top, eps)
