"""Kinds of rotary position embedding: which keys each has, and its angles per position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.config_reader import is_above_zero

FloatArray = npt.NDArray[np.float32]
Frequencies = Callable[[int], FloatArray]
"""Angle per position of each pair, for samples of a length."""


@dataclass(frozen=True)
class RopeParameters:
    """The part of config.json that tells about a rotation.

    Attributes:
        config: The file.
        values: The rotation's own keys in it.
        rotary_dim: Elements of a head that are rotated.
    """

    config: Mapping[str, Any]
    values: Mapping[str, Any]
    rotary_dim: int

    def number(self, key: str, default: float = 0.0) -> float:
        """A number among the rotation's values."""
        return float(self.values.get(key) or default)

    def frequencies(self, theta: float | None = None) -> FloatArray:
        """Angles per position without any scaling, by another base than its own if given."""
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        theta = self.values["rope_theta"] if theta is None else theta
        base = np.float32(min(theta, float(np.finfo(np.float32).max)))
        plain: FloatArray = np.float32(1.0) / base**exponents
        return plain

    def original_length(self) -> float:
        """Positions that the model was first trained on."""
        key = "original_max_position_embeddings"
        for length in (self.config.get(key), self.values.get(key)):
            if length is not None:
                return _above_zero(length)
        return self.longest()

    def longest(self) -> float:
        """Positions that the model is made for."""
        return _above_zero(self.config.get("max_position_embeddings"))


@dataclass(frozen=True)
class Kind:
    """A kind of scaling.

    Attributes:
        scale: The frequencies, and what cosines and sines are multiplied by.
        required: Keys that must be there.
        optional: Keys that may be.
        by_length: Whether the frequencies depend on how long a sample is.
    """

    scale: Callable[[RopeParameters], tuple[Frequencies, float]]
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    by_length: bool = False


def _above_zero(length: Any) -> float:
    if not is_above_zero(length) or length <= 1:
        raise UnsupportedModelError(
            "config.json: this kind of RoPE needs max_position_embeddings, a number above one"
        )
    return float(length)


def _default(rope: RopeParameters) -> tuple[Frequencies, float]:
    plain = rope.frequencies()
    return lambda positions: plain, 1.0


def _linear(rope: RopeParameters) -> tuple[Frequencies, float]:
    stretched = rope.frequencies() / np.float32(rope.values["factor"])
    return lambda positions: stretched, 1.0


def _dynamic(rope: RopeParameters) -> tuple[Frequencies, float]:
    """NTK-aware scaling: past the trained length, the base grows with the sequence."""
    # Hugging Face counts from max_position_embeddings here, whatever the original length.
    original, factor, dim = rope.longest(), rope.number("factor"), rope.rotary_dim
    if dim <= 2:
        raise UnsupportedModelError("config.json: RoPE of type 'dynamic' needs more than one pair")

    def frequencies(positions: int) -> FloatArray:
        growth = factor * max(float(positions), original) / original - (factor - 1)
        return rope.frequencies(rope.number("rope_theta") * growth ** (dim / (dim - 2)))

    return frequencies, 1.0


def _llama3(rope: RopeParameters) -> tuple[Frequencies, float]:
    """Llama 3's: long waves stretched by factor, short ones kept, those between blended."""
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise UnsupportedModelError(
            "config.json: RoPE's low_freq_factor must be below its high_freq_factor"
        )
    plain, context = rope.frequencies(), rope.original_length()
    waves = 2 * math.pi / plain
    share = np.clip((context / waves - low) / (high - low), 0.0, 1.0).astype(np.float32)
    stretched = plain / np.float32(rope.number("factor"))
    blended: FloatArray = (1 - share) * stretched + share * plain
    return lambda positions: blended, 1.0


def _yarn(rope: RopeParameters) -> tuple[Frequencies, float]:
    """YaRN (Peng et al., 2023): pairs are stretched by factor unless they turn often."""
    plain, factor = rope.frequencies(), rope.number("factor")
    original, theta, count = rope.original_length(), rope.number("rope_theta"), len(plain)
    if theta <= 1:
        raise UnsupportedModelError("config.json: RoPE of type 'yarn' needs a rope_theta above one")

    def pair_that_turns(times: float) -> float:
        return count * math.log(original / (times * 2 * math.pi)) / math.log(theta)

    low = pair_that_turns(rope.number("beta_fast", 32))
    high = pair_that_turns(rope.number("beta_slow", 1))
    if rope.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(count, dtype=np.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp.astype(np.float32)
    blended: FloatArray = plain / np.float32(factor) * (1 - kept) + plain * kept
    scaled = blended.astype(np.float32)
    return lambda positions: scaled, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeParameters) -> float:
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    factor = rope.number("factor")

    def magnitude(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0

    share, share_all = rope.number("mscale"), rope.number("mscale_all_dim")
    return magnitude(share) / magnitude(share_all) if share and share_all else magnitude(1.0)


def _longrope(rope: RopeParameters) -> tuple[Frequencies, float]:
    """LongRoPE (Ding et al., 2024): each pair has factors of its own, for short and long texts."""
    original, plain = rope.original_length(), rope.frequencies()
    short, long = (plain / _factors(rope, key, len(plain)) for key in LISTS)
    factor = _longrope_attention_factor(rope, original)
    return lambda positions: long if positions > original else short, factor


def _factors(rope: RopeParameters, key: str, pairs: int) -> FloatArray:
    factors = np.array(rope.values[key], np.float32)
    if factors.shape != (pairs,):
        raise UnsupportedModelError(
            f"config.json: RoPE's {key} has {len(factors)} numbers, but {pairs} pairs are rotated"
        )
    return factors


def _longrope_attention_factor(rope: RopeParameters, original: float) -> float:
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    longest = rope.config.get("max_position_embeddings")
    stretch = rope.number("factor", float(longest) / original if is_above_zero(longest) else 1.0)
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))


LISTS = ("short_factor", "long_factor")
"""Keys whose values are a number for each pair."""

KINDS = {
    "default": Kind(_default),
    "linear": Kind(_linear, frozenset({"factor"})),
    "dynamic": Kind(_dynamic, frozenset({"factor"}), by_length=True),
    "llama3": Kind(_llama3, frozenset({"factor", "low_freq_factor", "high_freq_factor"})),
    "yarn": Kind(
        _yarn,
        frozenset({"factor"}),
        frozenset(
            {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
        ),
    ),
    "longrope": Kind(
        _longrope, frozenset(LISTS), frozenset({"factor", "attention_factor"}), by_length=True
    ),
}
"""By the name that config.json has for it."""
