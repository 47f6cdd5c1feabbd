"""How GGUF files say what is rotated, and how frequencies are scaled: both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief
from qlora_wgpu.families.gpt_oss import YARN
from qlora_wgpu.families.parts.rope import Rope
from qlora_wgpu.gguf.architecture import ModelKeys
from qlora_wgpu.gguf.keys import Keys, shortest

# ---- reading -------------------------------------------------------------------------------------

_BASE = 10_000.0
FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)

# Llama 3's: what its factors are made of is not stored beside them.
_LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH = 8192
_SAME = 1e-5  # relative: factors are made in float32, in another order


def read_rope(keys: Keys, file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """``rope_theta`` and, where it is scaled, ``rope_scaling``."""
    theta = keys.number("rope.freq_base", _BASE)
    scaling = _scaling(keys) or {}
    if any(name in file for name in (LONG_FACTORS, SHORT_FACTORS)):
        scaling = _longrope(keys, file)
    elif scaling.get("rope_type") == "longrope":
        raise CheckpointError(f"{keys.where} lacks {LONG_FACTORS}, which its rope.scaling asks for")
    elif FACTORS in file:
        if scaling:
            raise UnsupportedModelError(
                f"{keys.where} has both {FACTORS} and rope.scaling, which are not computed together"
            )
        scaling = _of_factors(file.floats(FACTORS), theta, head_dim)
    keys.ignore("rope.scaling.finetuned", "rope.scaling.original_context_length")
    return {"rope_theta": theta, **({"rope_scaling": scaling} if scaling else {})}


def _scaling(keys: Keys) -> dict[str, Any] | None:
    kind = keys.raw("rope.scaling.type")
    factor = keys.number("rope.scaling.factor", None)
    old = keys.number("rope.scale_linear", None)  # the key's first name
    if factor is None:
        factor = old
    if kind == "none" or (kind is None and factor in (None, 0.0, 1.0)):
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor} if factor else None
    if kind == "longrope":
        return {"rope_type": "longrope"}
    if kind != "yarn" or not factor:
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.rope.scaling.type = {brief(kind)} is not computed"
        )
    keys.refuse("rope.scaling.yarn_ext_factor", 1.0)
    scaling = {"rope_type": "yarn", "factor": factor}
    for name in ("beta_fast", "beta_slow"):
        value = keys.number(f"rope.scaling.yarn_{name}", None)
        if value is not None:
            scaling[name] = value
    length = keys.integer("rope.scaling.original_context_length", None)
    return scaling if length is None else {**scaling, "original_max_position_embeddings": length}


def _longrope(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    factor = keys.number("rope.scaling.attn_factor", None)
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": _shortest(file.floats(SHORT_FACTORS)),
        "long_factor": _shortest(file.floats(LONG_FACTORS)),
    }
    length = keys.integer("rope.scaling.original_context_length", None)
    more = {"attention_factor": factor, "original_max_position_embeddings": length}
    return scaling | {key: value for key, value in more.items() if value is not None}


def _of_factors(factors: npt.NDArray[np.float32], theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's parameters, if these are its factors; else the factors, for texts of any length."""
    factor = float(factors.max(initial=1.0))
    if np.allclose(factors, _llama3(factor, theta, head_dim, len(factors)), rtol=_SAME, atol=0):
        return {
            "rope_type": "llama3",
            "factor": shortest(factor),
            **_LLAMA3_BANDS,
            "original_max_position_embeddings": _LLAMA3_LENGTH,
        }
    listed = _shortest(factors)
    return {
        "rope_type": "longrope",
        "short_factor": listed,
        "long_factor": listed,
        "attention_factor": 1.0,
    }


def _llama3(factor: float, theta: float, head_dim: int, pairs: int) -> npt.NDArray[np.float64]:
    """By what Llama 3 divides the frequency of each pair."""
    low, high = _LLAMA3_BANDS.values()
    waves = 2 * np.pi * theta ** (2 * np.arange(pairs) / head_dim)
    share = np.clip((_LLAMA3_LENGTH / waves - low) / (high - low), 0, 1)
    divisors: npt.NDArray[np.float64] = 1 / ((1 - share) / factor + share)
    return divisors


def _shortest(values: npt.NDArray[np.float32]) -> list[float]:
    return [shortest(value) for value in values.tolist()]


# ---- writing -------------------------------------------------------------------------------------

FloatArray = npt.NDArray[np.float32]
_NO_ROTATION_EACH = {"smollm3": 4}  # the layers that llama.cpp leaves unrotated
# Where it rotates layers with a window alone, if there are any.
_ROTATES_SLIDING = ("cohere2", "exaone4", "exaone-moe")
_GROWS = "mistral3"  # whose queries grow with their position


def rope_keys(keys: ModelKeys) -> None:
    """Adds the base, the elements that are rotated, and how frequencies are scaled."""
    _check_layers(keys)
    far, near = _ropes(keys)
    keys.values["rope.dimension_count"] = far.rotary_dim
    keys.values["rope.freq_base"] = float(far.theta)
    if near is not None and keys.architecture.name == "olmo2":
        if near.kind != "default" or near.theta != far.theta:
            raise keys.refuse("layers with a window whose rotation is scaled or has another base")
    elif near is not None:
        if near.kind != "default":
            raise keys.refuse("a scaled rotation of layers with a window")
        keys.values["rope.freq_base_swa"] = float(near.theta)
    _scaling_keys(keys, far)


def _check_layers(keys: ModelKeys) -> None:
    """Refuses layers that rotate, or do not, where llama.cpp does otherwise."""
    label = keys.architecture.name
    each = _NO_ROTATION_EACH.get(label)
    has_windows = any(attention.window is not None for attention in keys.attentions)
    if keys.architecture.windows == "of 64 layers" and len(keys.decoder.layers) != 64:
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
    if keys.architecture.name in _ROTATES_SLIDING:
        return far, None
    is_same = near is None or (near.theta, near.kind) == (far.theta, far.kind)
    return far, None if is_same and keys.architecture.windows != "periodic" else near


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
    if keys.architecture.name == _GROWS:
        share = float(given.get("mscale_all_dim") or 0.0)
        usual /= stretch * share + 1.0
        keys.values["rope.scaling.yarn_log_multiplier"] = share
    betas = given.get("beta_fast") or 32, given.get("beta_slow") or 1
    # Of gpt-oss it reads what is told of others, and the published ones are not truncated.
    truncates = keys.architecture.name != "gpt-oss"
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
    if not given and keys.architecture.name == "gpt-oss":
        given = YARN
    given = given.get("full_attention") or given
    return dict(given)


def divisors(keys: ModelKeys) -> dict[str, FloatArray]:
    """By what the frequency of each pair is divided, where no key tells it."""
    rope = next((a.rope for a in keys.attentions if a.rope is not None), None)
    if rope is None:  # latent attention's, which keys tell of whole
        return {}
    if rope.kind == "llama3":
        if "llama3" not in keys.architecture.scalings:
            raise keys.refuse("RoPE of type llama3")
        return {FACTORS: _of_rope(rope, 1)}
    if rope.kind == "longrope":
        if "longrope" not in keys.architecture.scalings:
            raise keys.refuse("RoPE of type longrope")
        given = _parameters(keys)
        lists = {SHORT_FACTORS: given["short_factor"], LONG_FACTORS: given["long_factor"]}
        return {name: np.array(values, np.float32) for name, values in lists.items()}
    return {}


def _of_rope(rope: Rope, length: int) -> FloatArray:
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    plain = float(rope.theta) ** -exponents
    return (plain / rope.frequencies(length)).astype(np.float32)
