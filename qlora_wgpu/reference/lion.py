"""Clipping by the global norm and Lion, on a flat vector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass
class State:
    """The parameters and Lion's moment."""

    p: Array
    m: Array


def step(
    state: State,
    gradient: Array,
    tokens: int,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    max_norm: float,
) -> tuple[float, Array]:
    """One step from a summed gradient.

    Returns:
        The norm of the mean gradient, and what each update took its sign from.
    """
    if not tokens:
        return 0.0, np.zeros_like(state.p)
    g = gradient / tokens
    norm = float(np.sqrt(np.sum(g * g)))
    if max_norm > 0:
        g = g * min(1.0, max_norm / (norm + 1e-6))
    between = beta1 * state.m + (1 - beta1) * g
    state.p = state.p * (1 - lr * weight_decay) - lr * np.sign(between)
    state.m = beta2 * state.m + (1 - beta2) * g
    return norm, between
