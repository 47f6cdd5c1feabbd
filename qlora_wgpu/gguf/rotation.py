"""RoPE in GGUF files, both ways: what is rotated, and how frequencies are scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief
from qlora_wgpu.families.gpt_oss import YARN
from qlora_wgpu.families.parts.rope import Rope
from qlora_wgpu.gguf.architecture import Keys, ModelKeys, shortest

# ---- reading -------------------------------------------------------------------------------------

_BASE = 10_000.0
FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)
FloatArray = npt.NDArray[np.float32]

# Llama 3's parameters, which files do not have, only the factors that follow from them.
_LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH = 8192
_TOLERANCE = 1e-5  # relative: factors are computed in float32, in another order


def read_rope(keys: Keys, file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """``rope_theta`` and, if RoPE is scaled, ``rope_scaling``."""
    theta = keys.number("rope.freq_base", _BASE)
    scaling = _scaling(keys) or {}
    if any(name in file for name in (LONG_FACTORS, SHORT_FACTORS)):
        scaling = _longrope(keys, file)
    elif scaling.get("rope_type") == "longrope":
        raise CheckpointError(f"{keys.where}: {LONG_FACTORS} is missing, but rope.scaling needs it")
    elif FACTORS in file:
        if scaling:
            raise UnsupportedModelError(
                f"{keys.where}: {FACTORS} together with rope.scaling is not supported"
            )
        scaling = _scaling_of_factors(file.floats(FACTORS), theta, head_dim)
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
            f"{keys.where}: {keys.architecture}.rope.scaling.type = {brief(kind)} is not supported"
        )
    keys.require("rope.scaling.yarn_ext_factor", 1.0)
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


def _scaling_of_factors(factors: FloatArray, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's parameters if these are its factors, otherwise the factors for any length."""
    factor = float(factors.max(initial=1.0))
    llama3 = _llama3_factors(factor, theta, head_dim, len(factors))
    if np.allclose(factors, llama3, rtol=_TOLERANCE, atol=0):
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


def _llama3_factors(
    factor: float, theta: float, head_dim: int, pairs: int
) -> npt.NDArray[np.float64]:
    low, high = _LLAMA3_BANDS.values()
    waves = 2 * np.pi * theta ** (2 * np.arange(pairs) / head_dim)
    share = np.clip((_LLAMA3_LENGTH / waves - low) / (high - low), 0, 1)
    divisors: npt.NDArray[np.float64] = 1 / ((1 - share) / factor + share)
    return divisors


def _shortest(values: FloatArray) -> list[float]:
    return [shortest(value) for value in values.tolist()]


# ---- writing -------------------------------------------------------------------------------------

_WITHOUT_ROPE = {"smollm3": 4}  # llama.cpp does not rotate every n-th layer
# llama.cpp rotates only layers with a window, if there are any.
_ROTATES_SLIDING = ("afmoe", "cohere2", "exaone4", "exaone-moe")
_MAY_LACK_ROPE = ("granitehybrid",)  # where a key says so
_SCALES_QUERIES = "mistral3"  # by their position


def rope_keys(keys: ModelKeys) -> None:
    """Adds the base, the number of rotated elements, and how frequencies are scaled."""
    has_rope = any(attention.rope is not None for attention in keys.attentions)
    if keys.architecture.name in _MAY_LACK_ROPE and not has_rope:
        keys.values["rope.dimension_count"] = keys.decoder.dimensions.head_dim
        return
    _check_layers(keys)
    full, sliding = _ropes(keys)
    keys.values["rope.dimension_count"] = full.rotary_dim
    keys.values["rope.freq_base"] = float(full.theta)
    if sliding is not None and keys.architecture.name == "olmo2":
        if sliding.kind != "default" or sliding.theta != full.theta:
            raise keys.unsupported(
                "layers with a window whose rotation is scaled or has another base"
            )
    elif sliding is not None:
        if sliding.kind != "default":
            raise keys.unsupported("a scaled rotation of layers with a window")
        keys.values["rope.freq_base_swa"] = float(sliding.theta)
    _scaling_keys(keys, full)


def _check_layers(keys: ModelKeys) -> None:
    """Refuses a model with RoPE in other layers than llama.cpp."""
    label = keys.architecture.name
    if keys.architecture.windows == "listed":  # so are layers with RoPE
        return
    each = _WITHOUT_ROPE.get(label)
    has_windows = any(attention.window is not None for attention in keys.attentions)
    if keys.architecture.windows == "of 64 layers" and len(keys.decoder.layers) != 64:
        has_windows = False  # llama.cpp ignores them and rotates all layers
    for i, attention in enumerate(keys.attentions):
        rotates = each is None or (i + 1) % each != 0
        if label in _ROTATES_SLIDING and has_windows:
            rotates = attention.window is not None
        if (attention.rope is not None) != rotates:
            raise keys.unsupported(f"layer {i} {'without' if rotates else 'with'} RoPE")
        if attention.query_rope is not None and label != _SCALES_QUERIES:
            raise keys.unsupported("queries that are rotated differently from keys")


def _ropes(keys: ModelKeys) -> tuple[Rope, Rope | None]:
    """The rotation of layers with full attention, and of those with a window if it differs."""
    both: dict[bool, Rope] = {}
    for attention in keys.attentions:
        if attention.rope is not None:
            both.setdefault(attention.window is not None, attention.rope)
    full = both.get(False, both.get(True))
    if full is None:
        raise keys.unsupported("attention without RoPE")
    sliding = both.get(True)
    if keys.architecture.name in _ROTATES_SLIDING:
        return full, None
    is_same = sliding is None or (sliding.theta, sliding.kind) == (full.theta, full.kind)
    return full, None if is_same and keys.architecture.windows != "periodic" else sliding


def _scaling_keys(keys: ModelKeys, rope: Rope) -> None:
    given = _parameters(keys)
    if rope.kind == "linear":
        keys.values["rope.scaling.type"] = "linear"
        keys.values["rope.scaling.factor"] = float(given["factor"])
    elif rope.kind == "yarn":
        _yarn_keys(keys, rope, given)
    elif rope.kind not in ("default", "llama3", "longrope"):
        raise keys.unsupported(f"RoPE of type {rope.kind}")
    growth = next((a.query_rope.growth for a in keys.attentions if a.query_rope is not None), None)
    if growth is not None:
        keys.values["attention.temperature_scale"] = float(growth.beta)
        if keys.values.get("rope.scaling.original_context_length") != growth.length:
            raise keys.unsupported(
                "scaled queries without YaRN, or with another original length than YaRN's"
            )
    if rope.kind == "longrope":
        keys.values["rope.scaling.type"] = "longrope"  # otherwise llama ignores the tensors
        keys.values["rope.scaling.attn_factor"] = float(rope.factor)
        keys.values["rope.scaling.original_context_length"] = int(
            given.get("original_max_position_embeddings")
            or keys.config.get("original_max_position_embeddings")
            or keys.values["context_length"]
        )


def _yarn_keys(keys: ModelKeys, rope: Rope, given: dict[str, Any]) -> None:
    """Adds YaRN, for which llama.cpp has fixed betas and derives the factor of cosines."""
    factor = float(given["factor"])
    stretch = 0.1 * np.log(factor) if factor > 1 else 0.0
    default = stretch + 1.0
    if keys.architecture.name == _SCALES_QUERIES:
        share = float(given.get("mscale_all_dim") or 0.0)
        default /= stretch * share + 1.0
        keys.values["rope.scaling.yarn_log_multiplier"] = share
    betas = given.get("beta_fast") or 32, given.get("beta_slow") or 1
    truncates = keys.architecture.name != "gpt-oss"  # as published
    is_default = given.get("truncate", True) == truncates
    if not np.isclose(rope.factor, default, rtol=1e-5) or not is_default:
        raise keys.unsupported("YaRN with a non-default mscale, attention_factor or truncate")
    if betas != (32, 1):
        raise keys.unsupported(f"YaRN with beta_fast and beta_slow of {betas}")
    length = keys.config.get("original_max_position_embeddings", keys.values["context_length"])
    write_yarn(keys, given, length)


def write_yarn(keys: ModelKeys, given: Mapping[str, Any], length: int) -> None:
    """Adds YaRN's factor and original length, by default ``length``."""
    keys.values |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(given["factor"]),
        "rope.scaling.original_context_length": int(
            given.get("original_max_position_embeddings") or length
        ),
    }


def _parameters(keys: ModelKeys) -> dict[str, Any]:
    """The rotation's part of config.json, for layers with full attention."""
    given = keys.config.get("rope_scaling") or keys.config.get("rope_parameters") or {}
    if not given and keys.architecture.name == "gpt-oss":
        given = YARN
    given = given.get("full_attention") or given
    return dict(given)


def divisors(keys: ModelKeys) -> dict[str, FloatArray]:
    """Divisors of each pair's frequency that no key describes, by their tensor's name."""
    rope = next((a.rope for a in keys.attentions if a.rope is not None), None)
    if rope is None or rope.kind not in ("llama3", "longrope"):
        return {}  # keys describe it, and latent attention's
    if rope.kind not in keys.architecture.scalings:
        raise keys.unsupported(f"RoPE of type {rope.kind}")
    if rope.kind == "llama3":
        exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
        plain = float(rope.theta) ** -exponents
        return {FACTORS: (plain / rope.frequencies(1)).astype(np.float32)}
    given = _parameters(keys)
    lists = {SHORT_FACTORS: given["short_factor"], LONG_FACTORS: given["long_factor"]}
    return {name: np.array(values, np.float32) for name, values in lists.items()}
