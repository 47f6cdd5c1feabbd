"""The loss that balances experts: experts · Σ_e f[e] · P[e] over the rows of all layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def sums(logits: Array, top_k: int, mask: Array) -> Array:
    """(2, experts): how often each is chosen, and its probabilities, over rows whose mask is 1."""
    chosen = np.zeros_like(logits)
    np.put_along_axis(chosen, np.argsort(-logits, axis=1, kind="stable")[:, :top_k], 1.0, 1)
    return np.stack([mask @ chosen, mask @ _softmax(logits)])


def loss(layers: Sequence[Array], top_k: int, mask: Array) -> float:
    """The loss of layers' logits, each (rows, experts)."""
    chosen, probability = np.sum([sums(logits, top_k, mask) for logits in layers], axis=0)
    rows = len(layers) * mask.sum()
    return float(layers[0].shape[1] * (chosen / rows) @ (probability / rows))


def backward(layers: Sequence[Array], top_k: int, mask: Array) -> list[Array]:
    """d loss / d logits of each layer; how often experts are chosen is a constant."""
    chosen = np.sum([sums(logits, top_k, mask)[0] for logits in layers], axis=0)
    rows = len(layers) * mask.sum()
    d = layers[0].shape[1] * chosen / rows**2
    gradients = []
    for logits in layers:
        p = _softmax(logits) * mask[:, None]
        gradients.append(p * (d - (p @ d)[:, None]))
    return gradients


def _softmax(logits: Array) -> Array:
    e = np.exp(logits - logits.max(1, keepdims=True))
    result: Array = e / e.sum(1, keepdims=True)
    return result
