"""Gemma 4 in GGUF files, both ways: its layers differ in heads, keys and MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.gemma4_text import FULL, ROPES, SLIDING
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.mlp import GatedMLP
from qlora_wgpu.families.parts.shared_kv import SharingDecoder, SharingLayer
from qlora_wgpu.gguf.architecture import (
    Config,
    Keys,
    ModelKeys,
    check_scales,
    shortest,
    window_pattern,
)
from qlora_wgpu.gguf.rotation import FACTORS

# ---- reading -------------------------------------------------------------------------------------

_TABLE = "per_layer_token_embd.weight"
_LARGE = 1e20  # divisors from this on stand for pairs that are not rotated
_DEFAULT_SHARE = 0.25  # of the pairs are rotated


def read_gemma4(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Gemma 4, text."""
    layers = config["num_hidden_layers"]
    types = window_pattern(keys, config, 6)["layer_types"]
    keys.require("attention.value_length", config["head_dim"])
    sliding_dim = keys.integer("attention.key_length_swa", config["head_dim"])
    keys.require("attention.value_length_swa", sliding_dim)
    keys.require("rope.dimension_count", config["head_dim"])
    keys.require("rope.dimension_count_swa", sliding_dim)
    if config.pop("rope_scaling", {}).get("rope_type") not in (None, "longrope", "llama3"):
        raise UnsupportedModelError(f"{keys.where}: rope.scaling is not supported for Gemma 4")
    heads = keys.each("attention.head_count_kv", layers)
    full_heads = _key_heads(keys, heads, types, FULL) or heads[0]
    sliding_heads = _key_heads(keys, heads, types, SLIDING) or full_heads
    shared = keys.integer("attention.shared_kv_layers", 0)
    own = [i for i, kind in enumerate(types[: layers - shared]) if kind == FULL]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "head_dim": sliding_dim,
        "num_key_value_heads": sliding_heads,
        "per_layer_config": {
            str(i): {"head_dim": config["head_dim"], "num_key_value_heads": full_heads}
            for i, kind in enumerate(types)
            if kind == FULL
        },
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in file for i in own),
        "num_kv_shared_layers": shared,
        **_feed_forward(keys, layers, shared),
        "sliding_window": keys.integer("attention.sliding_window"),
        "rope_parameters": {
            FULL: _rotation(file, config["rope_theta"], config["head_dim"]),
            SLIDING: {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", 10_000.0),
            },
        },
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0) or None,
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": (
            file.tensor(_TABLE).place.shape[0] if _TABLE in file else config["vocab_size"]
        ),
        **_experts(keys),
    }


def _key_heads(keys: Keys, heads: list[int], types: list[str], kind: str) -> int | None:
    """The number of key heads in layers of a kind; None without such layers."""
    found = {count for count, own in zip(heads, types, strict=True) if own == kind}
    if len(found) > 1:
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.attention.head_count_kv differs between layers of "
            f"{kind}, which is not supported"
        )
    return found.pop() if found else None


def _feed_forward(keys: Keys, layers: int, shared: int) -> Config:
    """The MLPs' size, and whether it doubles in layers with shared keys and values."""
    sizes = keys.each("feed_forward_length", layers)
    wide = bool(shared) and sizes[-1] == 2 * sizes[0]
    expected = [sizes[0] * (2 if wide and i >= layers - shared else 1) for i in range(layers)]
    if sizes != expected:
        raise UnsupportedModelError(
            f"{keys.where}: the combination of sizes in {keys.architecture}.feed_forward_length is "
            "not supported"
        )
    return {"intermediate_size": sizes[0], "use_double_wide_mlp": wide}


def _rotation(file: GGUFFile, theta: float, head_dim: int) -> Config:
    """The rotation of layers with full attention, where only the first pairs are rotated."""
    factors = file.floats(FACTORS) if FACTORS in file else np.ones(head_dim // 2, np.float32)
    rotated = int((factors < _LARGE).sum())
    factor = factors[0] if rotated else np.float32(1)
    if len(factors) != head_dim // 2 or not (factors[:rotated] == factor).all() or not factor > 0:
        raise CheckpointError(f"{file.path}: the values of {FACTORS} are not valid for Gemma 4")
    # Between two shares, since head_dim times the share is rounded down to pairs.
    share = min((2 * rotated + 0.5) / head_dim, 1.0)
    if int(_DEFAULT_SHARE * head_dim // 2) == rotated:
        share = _DEFAULT_SHARE
    rotation = {
        "rope_type": "proportional",
        "rope_theta": theta,
        "partial_rotary_factor": share if rotated else 0.0,
    }
    return rotation if factor == 1 else {**rotation, "factor": shortest(float(factor))}


def _experts(keys: Keys) -> Config:
    count = keys.integer("expert_count", 0)
    keys.require("expert_gating_func", 0, 1)
    if not count:
        keys.ignore("expert_used_count", "expert_feed_forward_length")
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    }


# ---- writing -------------------------------------------------------------------------------------

_NOT_ROTATED = 1e30  # the divisor of the frequency


def write_gemma4(keys: ModelKeys) -> None:
    """Adds all keys of Gemma 4, with its rotations and windows."""
    decoder = keys.decoder
    assert isinstance(decoder, SharingDecoder)
    layers = [layer for layer in decoder.layers if isinstance(layer, SharingLayer)]
    attentions = keys.attentions
    full = next(a for a in attentions if a.window is None)  # at least the last layer's
    sliding = next((a for a in attentions if a.window is not None), None)
    if sliding is None:
        raise keys.unsupported("a model without a sliding window")
    sliding_dim = decoder.dimensions.head_dim
    ropes: Mapping[str, Any] = keys.config.get("rope_parameters") or ROPES
    keys.values |= {
        "feed_forward_length": _for_layers([_mlp_size(layer) for layer in layers]),
        "attention.head_count_kv": _for_layers(
            [a.dimensions.num_key_value_heads for a in attentions]
        ),
        "attention.key_length": full.dimensions.head_dim,
        "attention.value_length": full.dimensions.head_dim,
        "attention.key_length_swa": sliding_dim,
        "attention.value_length_swa": sliding_dim,
        "attention.shared_kv_layers": sum(a.shared for a in attentions),
        "attention.sliding_window": sliding.window,
        "attention.sliding_window_pattern": np.array([a.window is not None for a in attentions]),
        "embedding_length_per_layer_input": decoder.inputs.size if decoder.inputs else 0,
        "rope.dimension_count": full.dimensions.head_dim,
        "rope.dimension_count_swa": sliding_dim,
        "rope.freq_base": float(ropes[FULL]["rope_theta"]),
        "rope.freq_base_swa": float({**ROPES, **ropes}[SLIDING]["rope_theta"]),
    }
    _check_sources(keys, layers)
    if _divisors(sliding, keys.values["rope.freq_base_swa"]).max() != 1.0:
        raise keys.unsupported("a scaled rotation of layers with a window")
    mixture = layers[0].mixture
    if mixture is not None:
        keys.values |= {
            "expert_count": mixture.num_experts,
            "expert_used_count": mixture.top_k,
            "expert_feed_forward_length": mixture.intermediate_size,
        }
    softcap = decoder.logit_softcap
    keys.values["final_logit_softcapping"] = float(softcap or 0.0)  # llama.cpp's default is 30
    check_scales(
        keys,
        embedding_scale=math.sqrt(decoder.dimensions.hidden_size),
        final_softcap=softcap,
        score_scale=1.0,
    )


def rotation_factors(keys: ModelKeys) -> dict[str, npt.NDArray[np.float32]]:
    """Divisors of the frequencies in layers with full attention."""
    full = next(a for a in keys.attentions if a.window is None)
    return {FACTORS: _divisors(full, keys.values["rope.freq_base"])}


def _divisors(attention: Attention, theta: float) -> npt.NDArray[np.float32]:
    assert attention.rope is not None
    size = attention.rope.rotary_dim
    plain = theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    scaled = np.asarray(attention.rope.frequencies(1), np.float64)
    divisors = np.divide(plain, scaled, out=np.full(len(plain), _NOT_ROTATED), where=scaled > 0)
    rounded: npt.NDArray[np.float32] = np.round(divisors, 5).astype(np.float32)
    return rounded


def _check_sources(keys: ModelKeys, layers: list[SharingLayer]) -> None:
    """Refuses layers whose keys and values llama.cpp would take from another layer.

    It takes them from the last two layers with their own: the last one for full attention, the one
    before it for windows.
    """
    own = [layer.kind for layer in layers if isinstance(layer.attention, Attention)
           and not layer.attention.shared]  # fmt: skip
    last = {kind: i for i, kind in enumerate(own)}
    for layer in layers[len(own) :]:
        if len(own) < 2 or last[layer.kind] != len(own) - (1 if layer.kind == FULL else 2):
            raise keys.unsupported("keys and values that are shared by layers in this order")


def _mlp_size(layer: SharingLayer) -> int:
    assert isinstance(layer.mlp, GatedMLP)
    return layer.mlp.dimensions.intermediate_size


def _for_layers(values: list[int]) -> npt.NDArray[np.uint32] | int:
    """An array for all layers, or one number if they agree."""
    return values[0] if len(set(values)) == 1 else np.array(values, np.uint32)
