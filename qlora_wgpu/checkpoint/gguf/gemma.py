"""Gemma 1 to 3 in GGUF files."""

from __future__ import annotations

from typing import Any

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.heads import usual_scale, whole_heads
from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.checkpoint.gguf.windows import window_pattern

Config = dict[str, Any]


def gemma(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Gemma 1."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    return {"hidden_activation": "gelu_pytorch_tanh"}


def gemma2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Gemma 2, every other layer of which slides."""
    whole_heads(keys, config)
    keys.refuse("attention.sliding_window_pattern", 2)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0) or None,
        "query_pre_attn_scalar": _query_scalar(keys, config, largest=46),
    }


def gemma3(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Gemma 3, text."""
    whole_heads(keys, config)
    window, layers = keys.integer("attention.sliding_window", 0), window_pattern(keys, config, 6)
    if not window:  # no layer slides then, whatever the pattern
        layers = {"layer_types": ["full_attention"] * len(layers["layer_types"])}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window or 4096,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _query_scalar(keys, config, largest=62),
        **layers,
    }


def _query_scalar(keys: Keys, config: Config, largest: int) -> float:
    """The reciprocal square of the scores' scale, which files tell by their number of layers."""
    scale = keys.number("attention.scale", 0.0)
    if scale:
        return float(scale) ** -2
    heads: int = config["num_attention_heads"]
    of_largest: float = config["hidden_size"] / heads
    return of_largest if config["num_hidden_layers"] == largest else float(config["head_dim"])
