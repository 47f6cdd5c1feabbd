"""Clipping by the global norm and AdamW, on a flat vector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass
class State:
    """The parameters and AdamW's moments."""

    p: Array
    m: Array
    v: Array


def step(
    state: State,
    gradient: Array,
    tokens: int,
    t: int,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    max_norm: float,
) -> float:
    """One step from a summed gradient; returns the norm of the mean gradient."""
    if not tokens:
        return 0.0
    g = gradient / tokens
    norm = float(np.sqrt(np.sum(g * g)))
    if max_norm > 0:
        g = g * min(1.0, max_norm / (norm + 1e-6))
    state.m = beta1 * state.m + (1 - beta1) * g
    state.v = beta2 * state.v + (1 - beta2) * g * g
    hat_m, hat_v = state.m / (1 - beta1**t), state.v / (1 - beta2**t)
    state.p = state.p - lr * weight_decay * state.p - lr * hat_m / (np.sqrt(hat_v) + epsilon)
    return norm
