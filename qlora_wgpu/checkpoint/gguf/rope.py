"""Rotary position embedding by a GGUF file's keys and tensors, as config.json has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.keys import Keys, shortest
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief

_BASE = 10_000.0
FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)

# Llama 3's: what its factors are made of is not stored beside them.
_LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH = 8192
_SAME = 1e-5  # relative: factors are made in float32, in another order


def read_rope(keys: Keys, file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """``rope_theta`` and, where it is scaled, ``rope_scaling``.

    Args:
        keys: The architecture's keys.
        file: The tensors, among which factors may be.
        head_dim: Elements of a head.

    Raises:
        CheckpointError: If a value is wrong.
        UnsupportedModelError: If it is scaled in a way that is not computed.
    """
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
