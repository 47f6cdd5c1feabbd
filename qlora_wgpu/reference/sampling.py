"""Sampling of a token from logits, with the device's noise."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from qlora_wgpu.reference.linear import mixed
from qlora_wgpu.reference.tape import Array


def scores(
    logits: Array,
    seen: npt.NDArray[np.bool_],
    *,
    biases: Mapping[int, float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
    seed: int,
    step: int,
) -> Array:
    """Scores (vocab), whose maximum is the sampled token; -inf for tokens filtered out."""
    x = logits.copy()
    x[list(biases)] += list(biases.values())
    x = np.where(seen, np.where(x < 0, x * penalty, x / penalty), x)
    if temperature <= 0:
        return x
    x = (x - x.max()) / temperature
    p, stays = np.exp(x), np.ones(x.shape, bool)
    if 0 < top_k < x.size:
        stays &= x >= np.sort(x)[-top_k]
    if top_p < 1:
        order = np.argsort(-x, kind="stable")
        weights = np.where(stays, p, 0.0)[order]
        last = int(np.searchsorted(np.cumsum(weights), top_p * weights.sum()))
        stays &= x >= x[order[min(last, x.size - 1)]]
    if min_p > 0:
        stays &= x >= np.log(min_p)
    return np.where(stays, x - np.log(exponentials(x.size, seed, step)), -np.inf)


def exponentials(vocab: int, seed: int, step: int) -> Array:
    """An exponentially distributed number for each token."""
    low, high = (np.array([part & 0xFFFFFFFF], np.uint32) for part in (seed, seed >> 32))
    with np.errstate(over="ignore"):
        text = mixed(mixed(low ^ mixed(high)) + np.uint32(step))
        tokens = np.arange(vocab, dtype=np.uint32) * np.uint32(0x9E3779B9)
        bits = mixed(text ^ mixed(tokens)).astype(np.float64)
    return np.minimum(-np.log1p(-(bits + 0.5) / 2**32), 25 * np.log(2))
