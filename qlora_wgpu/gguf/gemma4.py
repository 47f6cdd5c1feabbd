"""Gemma 4 in GGUF files, both ways; its layers differ in heads, keys and MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.gemma4_text import FULL, ROPES, SLIDING
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.mlp import GatedMLP
from qlora_wgpu.families.parts.shared_kv import SharingDecoder, SharingLayer
from qlora_wgpu.gguf.architecture import Config, ModelKeys, check_scales, window_pattern
from qlora_wgpu.gguf.keys import Keys, shortest
from qlora_wgpu.gguf.rotation import FACTORS

# ---- reading -------------------------------------------------------------------------------------

_TABLE = "per_layer_token_embd"
_LARGE = 1e20  # by which a frequency is divided that does not turn
_USUAL = 0.25  # of the pairs turn


def read_gemma4(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Gemma 4, text."""
    layers = config["num_hidden_layers"]
    types = window_pattern(keys, config, 6)["layer_types"]
    keys.refuse("attention.value_length", config["head_dim"])
    near_dim = keys.integer("attention.key_length_swa", config["head_dim"])
    keys.refuse("attention.value_length_swa", near_dim)
    keys.refuse("rope.dimension_count", config["head_dim"])
    keys.refuse("rope.dimension_count_swa", near_dim)
    if config.pop("rope_scaling", {}).get("rope_type") not in (None, "longrope", "llama3"):
        raise UnsupportedModelError(f"{keys.where}: rope.scaling is not computed for Gemma 4")
    heads = keys.each("attention.head_count_kv", layers)
    far_heads = _same(keys, heads, types, FULL) or heads[0]
    near_heads = _same(keys, heads, types, SLIDING) or far_heads
    shared = keys.integer("attention.shared_kv_layers", 0)
    table = f"{_TABLE}.weight"
    own = [i for i, kind in enumerate(types[: layers - shared]) if kind == FULL]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "head_dim": near_dim,
        "num_key_value_heads": near_heads,
        "per_layer_config": {
            str(i): {"head_dim": config["head_dim"], "num_key_value_heads": far_heads}
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
            file.tensor(table).place.shape[0] if table in file else config["vocab_size"]
        ),
        **_experts(keys),
    }


def _same(keys: Keys, heads: list[int], types: list[str], kind: str) -> int | None:
    """The heads of keys of all layers of a kind; None where there is none."""
    found = {count for count, own in zip(heads, types, strict=True) if own == kind}
    if len(found) > 1:
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.attention.head_count_kv has several numbers for "
            f"layers of {kind}, which are not computed together"
        )
    return found.pop() if found else None


def _feed_forward(keys: Keys, layers: int, shared: int) -> Config:
    """The MLPs' size, and whether it is twice that where keys and values are shared."""
    sizes = keys.each("feed_forward_length", layers)
    wide = bool(shared) and sizes[-1] == 2 * sizes[0]
    expected = [sizes[0] * (2 if wide and i >= layers - shared else 1) for i in range(layers)]
    if sizes != expected:
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.feed_forward_length has MLPs of sizes that are not "
            "computed together"
        )
    return {"intermediate_size": sizes[0], "use_double_wide_mlp": wide}


def _rotation(file: GGUFFile, theta: float, head_dim: int) -> Config:
    """That of layers which see everything: the first pairs turn, the others are left."""
    factors = file.floats(FACTORS) if FACTORS in file else np.ones(head_dim // 2, np.float32)
    turned = int((factors < _LARGE).sum())
    factor = factors[0] if turned else np.float32(1)
    if len(factors) != head_dim // 2 or not (factors[:turned] == factor).all() or not factor > 0:
        raise CheckpointError(f"{file.path}: {FACTORS} is none that Gemma 4 has")
    # In between two shares, since a product with the share is rounded down to whole pairs.
    share = min((2 * turned + 0.5) / head_dim, 1.0)
    if int(_USUAL * head_dim // 2) == turned:
        share = _USUAL
    rotation = {
        "rope_type": "proportional",
        "rope_theta": theta,
        "partial_rotary_factor": share if turned else 0.0,
    }
    return rotation if factor == 1 else {**rotation, "factor": shortest(float(factor))}


def _experts(keys: Keys) -> Config:
    count = keys.integer("expert_count", 0)
    keys.refuse("expert_gating_func", 0, 1)
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

_STILL = 1e30  # divides the frequency of a pair that does not turn


def write_gemma4(keys: ModelKeys) -> None:
    """Adds all keys of it, rotations and windows, too."""
    decoder = keys.decoder
    assert isinstance(decoder, SharingDecoder)
    layers = [layer for layer in decoder.layers if isinstance(layer, SharingLayer)]
    attentions = keys.attentions
    far = next(a for a in attentions if a.window is None)  # the last layer's at least
    near = next((a for a in attentions if a.window is not None), None)
    if near is None:
        raise keys.refuse("layers none of which has a window")
    near_dim = decoder.dimensions.head_dim
    ropes: Mapping[str, Any] = keys.config.get("rope_parameters") or ROPES
    keys.values |= {
        "feed_forward_length": _numbers([_width(layer) for layer in layers]),
        "attention.head_count_kv": _numbers([a.dimensions.num_key_value_heads for a in attentions]),
        "attention.key_length": far.dimensions.head_dim,
        "attention.value_length": far.dimensions.head_dim,
        "attention.key_length_swa": near_dim,
        "attention.value_length_swa": near_dim,
        "attention.shared_kv_layers": sum(a.shared for a in attentions),
        "attention.sliding_window": near.window,
        "attention.sliding_window_pattern": np.array([a.window is not None for a in attentions]),
        "embedding_length_per_layer_input": decoder.inputs.size if decoder.inputs else 0,
        "rope.dimension_count": far.dimensions.head_dim,
        "rope.dimension_count_swa": near_dim,
        "rope.freq_base": float(ropes[FULL]["rope_theta"]),
        "rope.freq_base_swa": float({**ROPES, **ropes}[SLIDING]["rope_theta"]),
    }
    _check_sources(keys, layers)
    if _divisors(near, keys.values["rope.freq_base_swa"]).max() != 1.0:
        raise keys.refuse("a scaled rotation of layers with a window")
    mixture = layers[0].mixture
    if mixture is not None:
        keys.values |= {
            "expert_count": mixture.num_experts,
            "expert_used_count": mixture.top_k,
            "expert_feed_forward_length": mixture.intermediate_size,
        }
    softcap = decoder.logit_softcap
    keys.values["final_logit_softcapping"] = float(softcap or 0.0)  # 30 where nothing is told
    check_scales(
        keys,
        embedding_scale=math.sqrt(decoder.dimensions.hidden_size),
        final_softcap=softcap,
        score_scale=1.0,
    )


def rotation_factors(keys: ModelKeys) -> dict[str, npt.NDArray[np.float32]]:
    """By what the frequencies of layers without a window are divided, of which some do not turn."""
    far = next(a for a in keys.attentions if a.window is None)
    return {FACTORS: _divisors(far, keys.values["rope.freq_base"])}


def _divisors(attention: Attention, theta: float) -> npt.NDArray[np.float32]:
    assert attention.rope is not None
    size = attention.rope.rotary_dim
    plain = theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    turned = np.asarray(attention.rope.frequencies(1), np.float64)
    divisors = np.divide(plain, turned, out=np.full(len(plain), _STILL), where=turned > 0)
    rounded: npt.NDArray[np.float32] = np.round(divisors, 5).astype(np.float32)
    return rounded  # since both have been rounded before


def _check_sources(keys: ModelKeys, layers: list[SharingLayer]) -> None:
    """Refuses layers that share what llama.cpp takes from another one.

    It takes them of the last two layers that have their own: of the last where all is seen, and of
    the one before it where there is a window.
    """
    own = [layer.kind for layer in layers if isinstance(layer.attention, Attention)
           and not layer.attention.shared]  # fmt: skip
    last = {kind: i for i, kind in enumerate(own)}
    for layer in layers[len(own) :]:
        if len(own) < 2 or last[layer.kind] != len(own) - (1 if layer.kind == FULL else 2):
            raise keys.refuse("keys and values that are shared by layers in this order")


def _width(layer: SharingLayer) -> int:
    assert isinstance(layer.mlp, GatedMLP)
    return layer.mlp.dimensions.intermediate_size


def _numbers(values: list[int]) -> npt.NDArray[np.uint32] | int:
    """A number of each layer, or one where all are the same."""
    return values[0] if len(set(values)) == 1 else np.array(values, np.uint32)
