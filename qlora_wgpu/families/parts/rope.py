"""Rotary position embedding from a config.json, old and new keys: kinds, angles, frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families.parts.config import is_above_zero

_AXES = 3  # time, height, width
_OWN = ("mrope_section", "mrope_interleaved")


def without_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with plain RoPE instead of multimodal RoPE.

    Each pair of a head is rotated by its frequency times one of the token's three positions: time,
    height or width, by ``mrope_section``. For text all three are equal, so any division into
    sections gives plain RoPE's angles.
    """
    plain = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(key), Mapping):
            _check(rope)
            kept = {name: value for name, value in rope.items() if name not in _OWN}
            kinds = {name for name in ("rope_type", "type") if kept.get(name) == "mrope"}
            plain[key] = {**kept, **dict.fromkeys(kinds, "default")}
    return plain


def _check(rope: Mapping[str, Any]) -> None:
    sections = rope.get("mrope_section", [0] * _AXES)
    is_list = isinstance(sections, list) and len(sections) == _AXES
    if not is_list or not all(type(size) is int and size >= 0 for size in sections):
        raise UnsupportedModelError(
            f"config.json: RoPE's mrope_section must be a list of {_AXES} numbers of pairs, got "
            f"{brief(sections)}"
        )
    if type(rope.get("mrope_interleaved", True)) is not bool:
        raise UnsupportedModelError(
            "config.json: RoPE's mrope_interleaved must be true or false, got "
            f"{brief(rope['mrope_interleaved'])}"
        )


def mrope_axes(
    config: Mapping[str, Any], default: Sequence[int], pairs: int, *, interleaved: bool = False
) -> tuple[int, ...] | None:
    """The axis of each of a head's ``pairs``: 0 for time, 1 for height, 2 for width.

    By ``mrope_section``, which has ``default`` values, they come in sections as in Qwen2-VL, or
    ``interleaved`` as in Qwen3-VL, where time takes the pairs that are left; None if sections do
    not fit, with which transformers fails.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    sections = rope.get("mrope_section", default)
    if interleaved:
        turns = [pair % _AXES for pair in range(pairs)]
        return tuple(
            axis if pair < _AXES * sections[axis] else 0 for pair, axis in enumerate(turns)
        )
    if sum(sections) != pairs:
        return None
    return tuple(axis for axis, size in enumerate(sections) for _ in range(size))


FloatArray = npt.NDArray[np.float32]
Frequencies = Callable[[int], FloatArray]
"""The angle per position of each pair, given a sample's length."""


@dataclass(frozen=True)
class RopeParameters:
    """RoPE's parameters in a config.json."""

    config: Mapping[str, Any]  # the file
    values: Mapping[str, Any]  # RoPE's own keys in it
    rotary_dim: int  # elements of a head that are rotated

    def number(self, key: str, default: float = 0.0) -> float:
        return float(self.values.get(key) or default)

    def frequencies(self, theta: float | None = None) -> FloatArray:
        """Angles per position without scaling, with another base if given."""
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        theta = self.values["rope_theta"] if theta is None else theta
        base = np.float32(min(theta, float(np.finfo(np.float32).max)))
        plain: FloatArray = np.float32(1.0) / base**exponents
        return plain

    def original_length(self) -> float:
        key = "original_max_position_embeddings"
        for length in (self.config.get(key), self.values.get(key)):
            if length is not None:
                return _above_zero(length)
        return self.longest()

    def longest(self) -> float:
        return _above_zero(self.config.get("max_position_embeddings"))


@dataclass(frozen=True)
class Kind:
    """A type of RoPE scaling."""

    # The frequencies, and the factor of cosines and sines.
    scale: Callable[[RopeParameters], tuple[Frequencies, float]]
    required: frozenset[str] = frozenset()  # required keys
    optional: frozenset[str] = frozenset()  # optional keys
    by_length: bool = False  # whether the frequencies depend on a sample's length


def _above_zero(length: Any) -> float:
    if not is_above_zero(length) or length <= 1:
        raise UnsupportedModelError(
            "config.json: this type of RoPE requires max_position_embeddings, a number above 1"
        )
    return float(length)


def _default(rope: RopeParameters) -> tuple[Frequencies, float]:
    plain = rope.frequencies()
    return lambda positions: plain, 1.0


def _linear(rope: RopeParameters) -> tuple[Frequencies, float]:
    stretched = rope.frequencies() / np.float32(rope.values["factor"])
    return lambda positions: stretched, 1.0


def _dynamic(rope: RopeParameters) -> tuple[Frequencies, float]:
    """NTK-aware scaling: beyond the trained length, the base grows with the sequence."""
    # Hugging Face uses max_position_embeddings here, whatever the original length is.
    original, factor, dim = rope.longest(), rope.number("factor"), rope.rotary_dim
    if dim <= 2:
        raise UnsupportedModelError(
            "config.json: RoPE of type 'dynamic' requires more than one pair"
        )

    def frequencies(positions: int) -> FloatArray:
        growth = factor * max(float(positions), original) / original - (factor - 1)
        return rope.frequencies(rope.number("rope_theta") * growth ** (dim / (dim - 2)))

    return frequencies, 1.0


def _llama3(rope: RopeParameters) -> tuple[Frequencies, float]:
    """Llama 3's scaling: long wavelengths are stretched, short ones kept, others interpolated."""
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
    """YaRN (Peng et al., 2023): slow pairs are stretched by the factor."""
    plain, factor = rope.frequencies(), rope.number("factor")
    original, theta, count = rope.original_length(), rope.number("rope_theta"), len(plain)
    if theta <= 1:
        raise UnsupportedModelError(
            "config.json: RoPE of type 'yarn' requires a rope_theta above 1"
        )

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
    """LongRoPE (Ding et al., 2024): each pair has factors for short and for long sequences."""
    original, plain = rope.original_length(), rope.frequencies()
    short, long = (plain / _factors(rope, key, len(plain)) for key in LISTS)
    factor = _longrope_attention_factor(rope, original)
    return lambda positions: long if positions > original else short, factor


def _factors(rope: RopeParameters, key: str, pairs: int) -> FloatArray:
    factors = np.array(rope.values[key], np.float32)
    if factors.shape != (pairs,):
        raise UnsupportedModelError(
            f"config.json: RoPE's {key} must have {pairs} numbers, one for each pair, got "
            f"{len(factors)}"
        )
    return factors


def _longrope_attention_factor(rope: RopeParameters, original: float) -> float:
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    longest = rope.config.get("max_position_embeddings")
    stretch = rope.number("factor", float(longest) / original if is_above_zero(longest) else 1.0)
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))


LISTS = ("short_factor", "long_factor")
"""Keys whose value is a list with a number for each pair."""

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
"""The types by config.json's names."""


_SYNONYMS = {"su": "longrope"}  # in the first Phi 3 configurations
_ALWAYS_ALLOWED = {
    "rope_type",
    "type",
    "rope_theta",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}
_NOT_NUMBERS = {"truncate", "rope_type", "type"}


@dataclass(frozen=True)
class Growth:
    """A factor 1 + beta · ln(1 + ⌊position / length⌋), which scales up late queries."""

    beta: float  # how fast it grows
    length: float  # positions before it starts growing

    def at(self, positions: npt.NDArray[np.integer[Any]]) -> FloatArray:
        """The factor at each position, float32 as in PyTorch."""
        lengths = np.floor(positions.astype(np.float32) / np.float32(self.length))
        factors: FloatArray = 1 + np.float32(self.beta) * np.log(1 + lengths)
        return factors


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of a model's heads."""

    rotary_dim: int  # elements of a head that are rotated
    frequencies: Frequencies  # angle per position of each pair, given a sample's length
    factor: float = 1.0  # factor of cosines and sines
    by_length: bool = False  # whether frequencies depend on the length
    growth: Growth | None = None  # another factor, by position; only if whole heads are rotated
    theta: float = 10000.0  # the base of the unscaled frequencies
    kind: str = "default"  # the type of scaling, by config.json's name

    def table(self, positions: int) -> FloatArray:
        """(positions, rotary_dim / 2, 2) of (cos, sin), for a sample of that length."""
        return self.angles(np.arange(positions), np.array([positions]))

    def angles(
        self, positions: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.integer[Any]]
    ) -> FloatArray:
        """(tokens, rotary_dim / 2, 2) of (cos, sin), angles in float32 as in PyTorch.

        ``positions`` are (tokens), or (tokens, rotary_dim / 2) if they differ between pairs.
        """
        distinct, which = np.unique(lengths, return_inverse=True)
        frequencies = np.stack([self.frequencies(int(length)) for length in distinct])[which]
        angles = positions.astype(np.float32).reshape(len(positions), -1) * frequencies
        table: FloatArray = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
        if self.growth is not None:
            table *= self.growth.at(positions)[:, None, None]
        return table if self.factor == 1.0 else table * np.float32(self.factor)

    def is_same(self, length: int, other: int) -> bool:
        return np.array_equal(self.frequencies(length), self.frequencies(other))


def read_rope(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    default_partial: float | None = None,
    default_theta: float = 10000.0,
) -> Rope:
    """Reads ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``, as in transformers.

    Families without a ``default_partial`` ignore ``partial_rotary_factor``.
    """
    parameters = _keys(config.get("rope_scaling") or config.get("rope_parameters"))
    thetas = (parameters.get("rope_theta"), config.get("rope_theta"), default_theta)
    values = {**parameters, "rope_theta": next(t for t in thetas if t is not None)}
    kind = _kind(values)
    _check_keys(kind, values)
    rotary_dim = head_dim
    if default_partial is not None:
        rotary_dim = _rotary_dim(config, values, head_dim, default_partial)
    elif kind != "default":  # only the default type ignores a partial factor
        _check_whole(config, values)
    scaling = KINDS[kind].scale(RopeParameters(config, values, rotary_dim))
    by_length, theta = KINDS[kind].by_length, values["rope_theta"]
    return Rope(rotary_dim, *scaling, by_length, theta=theta, kind=kind)


def read_ropes_of_layers(
    config: Mapping[str, Any], head_dim: int, theta: float, sliding_theta: float
) -> tuple[Rope, Rope]:
    kinds = ("full_attention", "sliding_attention")
    both = config.get("rope_parameters")
    # Of rope_scaling, the older name of the type does not count then, as in transformers.
    both = {kinds[0]: {"rope_type": "default"}} if both is None else both
    if not isinstance(both, Mapping) or not set(both) <= set(kinds):
        raise UnsupportedModelError(
            f"config.json: rope_parameters must have {' and '.join(kinds)}, got {both!r}"
        )
    scaling = config.get("rope_scaling")
    full = {**_keys(both.get(kinds[0])), **_keys(scaling)}
    base = config.get("rope_theta")
    far = _read_entry(config, full, head_dim, theta if base is None else base)
    return far, _read_entry(config, _keys(both.get(kinds[1])), head_dim, sliding_theta)


def _keys(parameters: Any) -> Mapping[str, Any]:
    if parameters and not isinstance(parameters, Mapping):
        raise UnsupportedModelError(
            f"config.json: RoPE's parameters must be an object, got {brief(parameters)}"
        )
    return parameters or {}


def _read_entry(
    config: Mapping[str, Any], entry: Mapping[str, Any], head_dim: int, theta: float
) -> Rope:
    """RoPE of one kind of layer, which depends on no other key but the model's length."""
    # transformers looks for this key outside the entry, where it never is.
    parameters = {key: value for key, value in entry.items() if key != "truncate"}
    longest = config.get("max_position_embeddings")
    alone = {"rope_parameters": parameters, "max_position_embeddings": longest}
    return read_rope(alone, head_dim, default_theta=theta)


def _kind(values: Mapping[str, Any]) -> str:
    kind = values.get("rope_type", values.get("type", "default"))
    kind = _SYNONYMS.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in KINDS:
        raise UnsupportedModelError(
            f"config.json: rope type {brief(kind)} is not supported (supported: {', '.join(KINDS)})"
        )
    return kind


def _check_keys(kind: str, values: Mapping[str, Any]) -> None:
    keys = {key for key, value in values.items() if value is not None}
    required = KINDS[kind].required
    wrong = (required - keys) | (keys - required - KINDS[kind].optional - _ALWAYS_ALLOWED)
    if wrong:
        raise UnsupportedModelError(
            f"config.json: RoPE of type {kind!r} has missing or unknown keys: "
            f"{', '.join(sorted(wrong))[:200]}"
        )
    for key in sorted(keys - _NOT_NUMBERS):
        numbers = values[key] if key in LISTS else [values[key]]
        if not isinstance(numbers, list) or not all(map(is_above_zero, numbers)):
            form = "a list of positive numbers" if key in LISTS else "a positive number"
            raise UnsupportedModelError(
                f"config.json: RoPE's {key} must be {form}, got {brief(values[key])}"
            )


def _rotary_dim(
    config: Mapping[str, Any], values: Mapping[str, Any], head_dim: int, default: float
) -> int:
    share = {"partial_rotary_factor": default, **config, **values}["partial_rotary_factor"]
    share = 1.0 if share is None else share
    if not is_above_zero(share) or share > 1:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor must be above 0 and at most 1, got {brief(share)}"
        )
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor {share} of head_dim {head_dim} rotates "
            f"{rotary_dim} elements, which must be an even number above 0"
        )
    return rotary_dim


def _check_whole(config: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Refuses a partial factor with which transformers itself fails."""
    share = {"partial_rotary_factor": None, **config, **values}["partial_rotary_factor"]
    if share not in (None, 1):
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor {share!r} with scaled RoPE is not supported for "
            "this model_type"
        )
