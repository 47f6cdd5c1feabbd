"""Rotary position embedding's frequencies from a config.json, old keys and new."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families.config_reader import is_above_zero
from qlora_wgpu.families.rope_kinds import (
    KINDS,
    LISTS,
    FloatArray,
    Frequencies,
    RopeParameters,
)

_SYNONYMS = {"su": "longrope"}  # as the first Phi 3 configurations have it
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
    """A factor 1 + beta · ln(1 + ⌊position / length⌋): queries far into a text are scaled up.

    Attributes:
        beta: How fast it grows.
        length: Positions that are left as they are.
    """

    beta: float
    length: float

    def at(self, positions: npt.NDArray[np.integer[Any]]) -> FloatArray:
        """The factor at each position, float32 as in PyTorch."""
        lengths = np.floor(positions.astype(np.float32) / np.float32(self.length))
        factors: FloatArray = 1 + np.float32(self.beta) * np.log(1 + lengths)
        return factors


@dataclass(frozen=True)
class Rope:
    """The rotation of a model's heads.

    Attributes:
        rotary_dim: Elements of a head that are rotated.
        frequencies: Angle per position of each pair, for samples of a length.
        factor: Factor of cosines and sines.
        by_length: Whether frequencies depend on the length at all.
        growth: Another factor, by position; of heads that are rotated whole.
        theta: The base of the frequencies before they are scaled.
        kind: How they are scaled, by config.json's name for it.
    """

    rotary_dim: int
    frequencies: Frequencies
    factor: float = 1.0
    by_length: bool = False
    growth: Growth | None = None
    theta: float = 10000.0
    kind: str = "default"

    def table(self, positions: int) -> FloatArray:
        """(positions, rotary_dim / 2, 2) of (cos, sin), of a sample of so many tokens."""
        return self.angles(np.arange(positions), np.array([positions]))

    def angles(
        self, positions: npt.NDArray[np.integer[Any]], lengths: npt.NDArray[np.integer[Any]]
    ) -> FloatArray:
        """(tokens, rotary_dim / 2, 2) of (cos, sin), angles in float32 as in PyTorch.

        Args:
            positions: Where in its sample each token stands.
            lengths: How long that sample is; one for each token, or one for all.
        """
        distinct, which = np.unique(lengths, return_inverse=True)
        frequencies = np.stack([self.frequencies(int(length)) for length in distinct])[which]
        angles = positions.astype(np.float32)[:, None] * frequencies
        table: FloatArray = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
        if self.growth is not None:
            table *= self.growth.at(positions)[:, None, None]
        return table if self.factor == 1.0 else table * np.float32(self.factor)

    def is_same(self, length: int, other: int) -> bool:
        """Whether samples of these two lengths are rotated alike."""
        return np.array_equal(self.frequencies(length), self.frequencies(other))


def read_rope(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    default_partial: float | None = None,
    default_theta: float = 10000.0,
) -> Rope:
    """Reads ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``, as transformers does.

    Args:
        config: A config.json.
        head_dim: Elements of a head.
        default_partial: The share of a head that is rotated, where no key says it; None for
            families that know no such share, whatever the file says.
        default_theta: The base, where no key says it.

    Raises:
        UnsupportedModelError: If the kind of scaling or one of its keys is not known, or a value
            is none that it can be.
    """
    parameters = _keys(config.get("rope_scaling") or config.get("rope_parameters"))
    thetas = (parameters.get("rope_theta"), config.get("rope_theta"), default_theta)
    values = {**parameters, "rope_theta": next(t for t in thetas if t is not None)}
    kind = _kind(values)
    _check_keys(kind, values)
    rotary_dim = head_dim
    if default_partial is not None:
        rotary_dim = _rotary_dim(config, values, head_dim, default_partial)
    elif kind != "default":  # which alone leaves a share out of account
        _check_whole(config, values)
    scaling = KINDS[kind].scale(RopeParameters(config, values, rotary_dim))
    by_length, theta = KINDS[kind].by_length, values["rope_theta"]
    return Rope(rotary_dim, *scaling, by_length, theta=theta, kind=kind)


def read_ropes_of_layers(
    config: Mapping[str, Any], head_dim: int, theta: float, sliding_theta: float
) -> tuple[Rope, Rope]:
    """The rotation of layers that see everything, and of those that slide.

    Args:
        config: A config.json; its ``rope_scaling`` and ``rope_theta`` are of the first kind.
        head_dim: Elements of a head.
        theta: The base of the first kind, where no key says it.
        sliding_theta: The base of the second.

    Raises:
        UnsupportedModelError: If ``rope_parameters`` has no such kinds, or as ``read_rope`` does.
    """
    kinds = ("full_attention", "sliding_attention")
    both = config.get("rope_parameters")
    both = {} if both is None else both
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
            f"config.json: RoPE's parameters must be keys, got {brief(parameters)}"
        )
    return parameters or {}


def _read_entry(
    config: Mapping[str, Any], entry: Mapping[str, Any], head_dim: int, theta: float
) -> Rope:
    """A rotation of one kind of layers: no other key tells of it but the model's length."""
    # transformers looks for this one beside the kinds, where it never is.
    parameters = {key: value for key, value in entry.items() if key != "truncate"}
    longest = config.get("max_position_embeddings")
    alone = {"rope_parameters": parameters, "max_position_embeddings": longest}
    return read_rope(alone, head_dim, default_theta=theta)


def _kind(values: Mapping[str, Any]) -> str:
    kind = values.get("rope_type", values.get("type", "default"))
    kind = _SYNONYMS.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in KINDS:
        raise UnsupportedModelError(
            f"config.json: rope type {brief(kind)} is not supported (known: {', '.join(KINDS)})"
        )
    return kind


def _check_keys(kind: str, values: Mapping[str, Any]) -> None:
    """Makes sure that keys are those of the kind, and values above zero."""
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
            form = "a list of numbers" if key in LISTS else "a number"
            raise UnsupportedModelError(
                f"config.json: RoPE's {key} must be {form} above zero, got {brief(values[key])}"
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
            f"{rotary_dim} elements, which is no even number above zero"
        )
    return rotary_dim


def _check_whole(config: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Refuses a share of heads where transformers itself fails at one."""
    share = {"partial_rotary_factor": None, **config, **values}["partial_rotary_factor"]
    if share not in (None, 1):
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor {share!r} is not supported for this model_type "
            "with RoPE that is scaled"
        )
