"""A head with LoRA: logits = scale · (x·Wᵀ + s·(mask∘x)·Aᵀ·Bᵀ), and the gradients of A and B."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.reference import linear

Array = npt.NDArray[np.float64]


def widened(
    hidden: Array, head: Array, a: Array, b: Array, s: float, mask: Array
) -> tuple[Array, Array]:
    """Hidden states and a head with r more columns, whose product is that of the head and its pair.

    ``reference.cross_entropy`` takes them as any others.
    """
    u = s * ((mask * hidden) @ a.T)
    return np.concatenate([hidden, u], axis=1), np.concatenate([head, b], axis=1)


def backward(
    dlogits: Array,
    hidden: Array,
    head: Array,
    a: Array,
    b: Array,
    s: float,
    mask: Array,
    scale: float = 1.0,
) -> tuple[Array, Array, Array]:
    """Returns d hidden (rows, in), dA (r, in), dB (vocab, r), of dlogits (rows, vocab)."""
    return linear.backward(scale * dlogits, hidden, head, a, b, s, mask)
