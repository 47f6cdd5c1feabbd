"""Rotary frequencies from a config.json, old keys and new."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import UnsupportedModelError

_KNOWN = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}
_ALWAYS_ALLOWED = {"rope_type", "type", "rope_theta", "original_max_position_embeddings"}


def inverse_frequencies(config: Mapping[str, Any], rotary_dim: int) -> npt.NDArray[np.float32]:
    """Angle per position of each rotated pair, in float32 as Hugging Face computes it.

    Args:
        config: A config.json, with ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.
        rotary_dim: Elements of a head that are rotated.

    Returns:
        (rotary_dim / 2) float32.

    Raises:
        UnsupportedModelError: If the kind of scaling or one of its keys is not known, or a value
            is no number that it can be.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise UnsupportedModelError(f"config.json: RoPE's parameters must be keys, got {given!r}")
    scaling = dict(given)
    theta = config.get("rope_theta")
    scaling.setdefault("rope_theta", 10000.0 if theta is None else theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KNOWN:
        raise UnsupportedModelError(
            f"config.json: rope type {kind!r} is not supported (known: {', '.join(_KNOWN)})"
        )
    missing = _KNOWN[kind] - set(scaling)
    unknown = set(scaling) - _KNOWN[kind] - _ALWAYS_ALLOWED
    if missing or unknown:
        raise UnsupportedModelError(
            f"config.json: RoPE of type {kind!r} has missing or unknown keys: "
            f"{', '.join(sorted(missing | unknown))}"
        )
    for key in ("rope_theta", *sorted(_KNOWN[kind])):
        value = scaling[key]
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise UnsupportedModelError(
                f"config.json: RoPE's {key} must be a number above zero, got {value!r}"
            )
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise UnsupportedModelError(
            "config.json: RoPE's low_freq_factor must be below its high_freq_factor"
        )
    theta = float(scaling["rope_theta"])
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    frequencies: npt.NDArray[np.float32] = np.float32(1.0) / np.float32(theta) ** exponents
    if kind == "linear":
        scaled: npt.NDArray[np.float32] = frequencies / np.float32(scaling["factor"])
        return scaled
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    return frequencies


def _llama3(
    frequencies: npt.NDArray[np.float32], scaling: Mapping[str, Any]
) -> npt.NDArray[np.float32]:
    """Llama 3.1's: long waves are stretched by factor, short ones kept, those between blended."""
    factor, context = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    waves = 2 * math.pi / frequencies
    share: npt.NDArray[np.float32] = np.clip(
        (context / waves - low) / (high - low), 0.0, 1.0
    ).astype(np.float32)
    stretched = frequencies / np.float32(factor)
    blended: npt.NDArray[np.float32] = (1 - share) * stretched + share * frequencies
    return blended


def rotation_table(frequencies: npt.NDArray[np.float32], positions: int) -> npt.NDArray[np.float32]:
    """(positions, len(frequencies), 2) of (cos, sin), angles rounded to float32 as in PyTorch."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    table: npt.NDArray[np.float32] = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    return table
