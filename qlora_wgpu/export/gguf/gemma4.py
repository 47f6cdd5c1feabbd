"""What a GGUF file says of Gemma 4: heads of two sizes, shared keys and values, layers' inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.rope import FACTORS
from qlora_wgpu.export.gguf.model_keys import ModelKeys
from qlora_wgpu.export.gguf.scales import check_scales
from qlora_wgpu.families.gemma4_text import FULL, ROPES, SLIDING
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.mlp import GatedMLP
from qlora_wgpu.families.parts.shared_kv import SharingDecoder, SharingLayer

_STILL = 1e30  # divides the frequency of a pair that does not turn


def gemma4(keys: ModelKeys) -> None:
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
