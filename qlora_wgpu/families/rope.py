"""Rotary position embedding's frequencies from a config.json, old keys and new."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import UnsupportedModelError

FloatArray = npt.NDArray[np.float32]

# By kind: keys that must be there, and keys that may.
_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        set(),
    ),
    "yarn": (
        {"factor"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": ({"short_factor", "long_factor"}, {"factor", "attention_factor"}),
}
_SYNONYMS = {"su": "longrope"}  # as the first Phi 3 configurations have it
_ALWAYS_ALLOWED = {
    "rope_type",
    "type",
    "rope_theta",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}
_LISTS = {"short_factor", "long_factor"}
_OTHERS = {"truncate", "rope_type", "type"}


@dataclass(frozen=True)
class Rope:
    """How a model's heads are rotated.

    Attributes:
        rotary_dim: Elements of a head that are rotated.
        frequencies: Angle per position of each pair, for sequences of a length.
        factor: What cosines and sines are multiplied by.
    """

    rotary_dim: int
    frequencies: Callable[[int], FloatArray]
    factor: float = 1.0

    def table(self, positions: int) -> FloatArray:
        """(positions, rotary_dim / 2, 2) of (cos, sin), angles in float32 as in PyTorch."""
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.frequencies(positions)
        table: FloatArray = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
        return table if self.factor == 1.0 else table * np.float32(self.factor)


def read_rope(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    layer_type: str | None = None,
    default_partial: float = 1.0,
    default_theta: float = 10000.0,
) -> Rope:
    """Reads ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.

    Args:
        config: A config.json.
        head_dim: Elements of a head.
        layer_type: Which of several entries counts, where layers differ in it.
        default_partial: The share of a head that is rotated, where no key says it.
        default_theta: The base, where no key says it.

    Raises:
        UnsupportedModelError: If the kind of scaling or one of its keys is not known, or a value
            is none that it can be.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(given, Mapping) and layer_type is not None and layer_type in given:
        given = given[layer_type]
    if not isinstance(given, Mapping):
        raise UnsupportedModelError(f"config.json: RoPE's parameters must be keys, got {given!r}")
    scaling = dict(given)
    theta = config.get("rope_theta")
    scaling.setdefault("rope_theta", default_theta if theta is None else theta)
    kind = _checked_kind(scaling)
    rotary_dim = _rotary_dim(config, scaling, head_dim, default_partial)
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    plain: FloatArray = np.float32(1.0) / np.float32(scaling["rope_theta"]) ** exponents
    if kind == "linear":
        plain = plain / np.float32(scaling["factor"])
    elif kind == "llama3":
        plain = _llama3(plain, scaling)
    elif kind == "dynamic":
        return Rope(rotary_dim, _dynamic(config, scaling, rotary_dim))
    elif kind == "yarn":
        return Rope(rotary_dim, _same(_yarn(config, scaling, plain)), _yarn_factor(scaling))
    elif kind == "longrope":
        return _longrope(config, scaling, plain, rotary_dim)
    return Rope(rotary_dim, _same(plain))


def _checked_kind(scaling: dict[str, Any]) -> str:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = _SYNONYMS.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in _KEYS:
        raise UnsupportedModelError(
            f"config.json: rope type {kind!r} is not supported (known: {', '.join(_KEYS)})"
        )
    needed, possible = _KEYS[kind]
    scaling = {key: value for key, value in scaling.items() if value is not None}
    missing = needed - set(scaling)
    unknown = set(scaling) - needed - possible - _ALWAYS_ALLOWED
    if missing or unknown:
        raise UnsupportedModelError(
            f"config.json: RoPE of type {kind!r} has missing or unknown keys: "
            f"{', '.join(sorted(missing | unknown))}"
        )
    for key in sorted(set(scaling) - _OTHERS):
        values = scaling[key] if key in _LISTS else [scaling[key]]
        if not isinstance(values, list) or not all(_positive(value) for value in values):
            wanted = "a list of numbers" if key in _LISTS else "a number"
            raise UnsupportedModelError(
                f"config.json: RoPE's {key} must be {wanted} above zero, got {scaling[key]!r}"
            )
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise UnsupportedModelError(
            "config.json: RoPE's low_freq_factor must be below its high_freq_factor"
        )
    return kind


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _rotary_dim(
    config: Mapping[str, Any], scaling: Mapping[str, Any], head_dim: int, default: float
) -> int:
    share = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    share = default if share is None else share
    if not _positive(share) or share > 1:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor must be above 0 and at most 1, got {share!r}"
        )
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor {share} of head_dim {head_dim} rotates "
            f"{rotary_dim} elements, which is no even number above zero"
        )
    return rotary_dim


def _same(frequencies: FloatArray) -> Callable[[int], FloatArray]:
    return lambda positions: frequencies


def _original_length(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> float:
    """Positions that the model was first trained on."""
    found = scaling.get("original_max_position_embeddings")
    if found is None and scaling:
        found = config.get("original_max_position_embeddings")
    if found is None:
        found = config.get("max_position_embeddings")
    if _positive(found):
        return float(found)  # type: ignore[arg-type]
    raise UnsupportedModelError(
        "config.json: this kind of RoPE needs max_position_embeddings, a number above zero"
    )


def _llama3(frequencies: FloatArray, scaling: Mapping[str, Any]) -> FloatArray:
    """Llama 3.1's: long waves are stretched by factor, short ones kept, those between blended."""
    factor, context = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    waves = 2 * math.pi / frequencies
    share: FloatArray = np.clip((context / waves - low) / (high - low), 0.0, 1.0).astype(np.float32)
    stretched = frequencies / np.float32(factor)
    blended: FloatArray = (1 - share) * stretched + share * frequencies
    return blended


def _dynamic(
    config: Mapping[str, Any], scaling: Mapping[str, Any], rotary_dim: int
) -> Callable[[int], FloatArray]:
    """NTK-aware scaling: past the trained length, the base grows with the sequence."""
    # Hugging Face counts from max_position_embeddings here, whatever the original length.
    original, factor = _original_length(config, {}), float(scaling["factor"])
    if rotary_dim <= 2:
        raise UnsupportedModelError("config.json: RoPE of type 'dynamic' needs more than one pair")

    def frequencies(positions: int) -> FloatArray:
        length = max(float(positions), original)
        grown = factor * length / original - (factor - 1)
        base = float(scaling["rope_theta"]) * grown ** (rotary_dim / (rotary_dim - 2))
        exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
        found: FloatArray = np.float32(1.0) / np.float32(base) ** exponents
        return found

    return frequencies


def _yarn(
    config: Mapping[str, Any], scaling: Mapping[str, Any], frequencies: FloatArray
) -> FloatArray:
    """YaRN (Peng et al., 2023): pairs are stretched by factor unless they turn often."""
    original, factor = _original_length(config, scaling), float(scaling["factor"])
    theta, count = float(scaling["rope_theta"]), len(frequencies)

    def pair_that_turns(times: float) -> float:
        return count * math.log(original / (times * 2 * math.pi)) / math.log(theta)

    low = pair_that_turns(float(scaling.get("beta_fast") or 32))
    high = pair_that_turns(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(count, dtype=np.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp.astype(np.float32)
    blended: FloatArray = frequencies / np.float32(factor) * (1 - kept) + frequencies * kept
    return blended.astype(np.float32)


def _yarn_factor(scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor = float(scaling["factor"])

    def magnitude(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0

    share, share_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if share and share_all:
        return magnitude(float(share)) / magnitude(float(share_all))
    return magnitude(1.0)


def _longrope(
    config: Mapping[str, Any], scaling: Mapping[str, Any], plain: FloatArray, rotary_dim: int
) -> Rope:
    """LongRoPE (Ding et al., 2024): each pair has factors of its own, for short and long texts."""
    original = _original_length(config, scaling)
    factors = {}
    for name in ("short_factor", "long_factor"):
        factors[name] = np.array(scaling[name], np.float32)
        if factors[name].shape != plain.shape:
            raise UnsupportedModelError(
                f"config.json: RoPE's {name} has {len(factors[name])} numbers, but {len(plain)} "
                "pairs are rotated"
            )
    given = scaling.get("attention_factor")
    longest = config.get("max_position_embeddings")
    stretch = float(longest or 0) / original if _positive(longest) else 1.0
    stretch = float(scaling.get("factor") or stretch)
    if given is not None:
        magnitude = float(given)
    else:
        magnitude = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))

    def frequencies(positions: int) -> FloatArray:
        found: FloatArray = (
            plain / factors["long_factor" if positions > original else "short_factor"]
        )
        return found

    return Rope(rotary_dim, frequencies, magnitude)
