"""Rotary position embedding as llama.cpp's keys and tensors have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.rope import FACTORS, LONG_FACTORS, SHORT_FACTORS
from qlora_wgpu.export.gguf.gemma4 import rotation_factors
from qlora_wgpu.export.gguf.model_keys import ModelKeys
from qlora_wgpu.families.gpt_oss import YARN
from qlora_wgpu.families.parts.rope import Rope

FloatArray = npt.NDArray[np.float32]
_NO_ROTATION_EACH = {"SMOLLM3": 4}  # the layers that llama.cpp leaves unrotated
# Where it rotates layers with a window alone, if there are any.
_ROTATES_SLIDING = ("COHERE2", "EXAONE4", "EXAONE_MOE")
_GROWS = "MISTRAL3"  # whose queries grow with their position


def rope_keys(keys: ModelKeys) -> None:
    """Adds the base, the elements that are rotated, and how frequencies are scaled.

    Raises:
        UnsupportedModelError: If llama.cpp rotates otherwise.
    """
    _check_layers(keys)
    far, near = _ropes(keys)
    keys.values["rope.dimension_count"] = far.rotary_dim
    keys.values["rope.freq_base"] = float(far.theta)
    if near is not None and keys.llama_cpp.label == "OLMO2":
        if near.kind != "default" or near.theta != far.theta:
            raise keys.refuse("layers with a window whose rotation is scaled or has another base")
    elif near is not None:
        if near.kind != "default":
            raise keys.refuse("a scaled rotation of layers with a window")
        keys.values["rope.freq_base_swa"] = float(near.theta)
    _scaling_keys(keys, far)


def _check_layers(keys: ModelKeys) -> None:
    """Refuses layers that rotate, or do not, where llama.cpp does otherwise."""
    label = keys.llama_cpp.label
    each = _NO_ROTATION_EACH.get(label)
    has_windows = any(attention.window is not None for attention in keys.attentions)
    if keys.llama_cpp.windows == "of 64 layers" and len(keys.decoder.layers) != 64:
        has_windows = False  # that llama.cpp knows of: it rotates all layers then
    for i, attention in enumerate(keys.attentions):
        rotates = each is None or (i + 1) % each != 0
        if label in _ROTATES_SLIDING and has_windows:
            rotates = attention.window is not None
        if (attention.rope is not None) != rotates:
            raise keys.refuse(f"positions in layer {i} as this model does")
        if attention.query_rope is not None and label != _GROWS:
            raise keys.refuse("queries that are rotated in another way than keys")


def _ropes(keys: ModelKeys) -> tuple[Rope, Rope | None]:
    """The rotation of layers that see everything, and of those that slide, if that differs."""
    both: dict[bool, Rope] = {}
    for attention in keys.attentions:
        if attention.rope is not None:
            both.setdefault(attention.window is not None, attention.rope)
    far = both.get(False, both.get(True))
    if far is None:
        raise keys.refuse("attention that knows no positions")
    near = both.get(True)
    if keys.llama_cpp.label in _ROTATES_SLIDING:
        return far, None
    is_same = near is None or (near.theta, near.kind) == (far.theta, far.kind)
    return far, None if is_same and keys.llama_cpp.windows != "periodic" else near


def _scaling_keys(keys: ModelKeys, rope: Rope) -> None:
    given = _parameters(keys)
    if rope.kind == "linear":
        keys.values["rope.scaling.type"] = "linear"
        keys.values["rope.scaling.factor"] = float(given["factor"])
    elif rope.kind == "yarn":
        _yarn_keys(keys, rope, given)
    elif rope.kind not in ("default", "llama3", "longrope"):
        raise keys.refuse(f"RoPE of type {rope.kind}")
    growth = next((a.query_rope.growth for a in keys.attentions if a.query_rope is not None), None)
    if growth is not None:
        keys.values["attention.temperature_scale"] = float(growth.beta)
        if keys.values.get("rope.scaling.original_context_length") != growth.length:
            raise keys.refuse("queries that grow without YaRN, or by another length than its own")
    if rope.kind == "longrope":
        keys.values["rope.scaling.type"] = "longrope"  # without it LLAMA leaves its tensors out
        keys.values["rope.scaling.attn_factor"] = float(rope.factor)
        keys.values["rope.scaling.original_context_length"] = int(
            given.get("original_max_position_embeddings")
            or keys.config.get("original_max_position_embeddings")
            or keys.values["context_length"]
        )


def _yarn_keys(keys: ModelKeys, rope: Rope, given: dict[str, Any]) -> None:
    """llama.cpp's own are the usual beta, and a factor of cosines that follows from the scale."""
    factor = float(given["factor"])
    stretch = 0.1 * np.log(factor) if factor > 1 else 0.0
    usual = stretch + 1.0
    if keys.llama_cpp.label == _GROWS:
        share = float(given.get("mscale_all_dim") or 0.0)
        usual /= stretch * share + 1.0
        keys.values["rope.scaling.yarn_log_multiplier"] = share
    betas = given.get("beta_fast") or 32, given.get("beta_slow") or 1
    # Of gpt-oss it reads what is told of others, and the published ones are not truncated.
    truncates = keys.llama_cpp.label != "GPT_OSS"
    is_usual = given.get("truncate", True) == truncates
    if not np.isclose(rope.factor, usual, rtol=1e-5) or not is_usual:
        raise keys.refuse("YaRN with factors of its own (mscale, attention_factor, truncate)")
    if betas != (32, 1):
        raise keys.refuse(f"YaRN with beta_fast and beta_slow of {betas}")
    length = given.get("original_max_position_embeddings") or keys.config.get(
        "original_max_position_embeddings", keys.values["context_length"]
    )
    keys.values |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": int(length),
    }


def _parameters(keys: ModelKeys) -> dict[str, Any]:
    """The rotation's own keys in config.json, those of layers that see everything."""
    given = keys.config.get("rope_scaling") or keys.config.get("rope_parameters") or {}
    if not given and keys.llama_cpp.label == "GPT_OSS":
        given = YARN
    given = given.get("full_attention") or given
    return dict(given)


def rope_tensors(keys: ModelKeys) -> dict[str, FloatArray]:
    """By what the frequency of each pair is divided, where no key tells it.

    Raises:
        UnsupportedModelError: If llama.cpp reads no such factors for the architecture.
    """
    if keys.llama_cpp.label == "GEMMA4":
        return rotation_factors(keys)
    rope = next((a.rope for a in keys.attentions if a.rope is not None), None)
    if rope is None:  # latent attention's, which keys tell of whole
        return {}
    if rope.kind == "llama3":
        if "llama3" not in keys.llama_cpp.scalings:
            raise keys.refuse("RoPE of type llama3")
        return {FACTORS: _divisors(rope, 1)}
    if rope.kind == "longrope":
        if "longrope" not in keys.llama_cpp.scalings:
            raise keys.refuse("RoPE of type longrope")
        given = _parameters(keys)
        lists = {SHORT_FACTORS: given["short_factor"], LONG_FACTORS: given["long_factor"]}
        return {name: np.array(values, np.float32) for name, values in lists.items()}
    return {}


def _divisors(rope: Rope, length: int) -> FloatArray:
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    plain = float(rope.theta) ** -exponents
    return (plain / rope.frequencies(length)).astype(np.float32)
