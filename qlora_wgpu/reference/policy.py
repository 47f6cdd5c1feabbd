"""Losses of completions' tokens, by TRL's formulas for GRPO and its kin."""

import numpy as np

from qlora_wgpu.reference.pointwise import sigmoid
from qlora_wgpu.reference.tape import Array


def token_losses(
    logps: Array, old: Array, reference: Array, advantages: Array, loss_type: str, beta: float,
    epsilon: float, epsilon_high: float, delta: float = np.inf,
    temperatures: tuple[float, float] = (1.0, 1.05),
    mean_ratio: Array | None = None, kept: Array | float = 1.0, *, corrects: bool = True,
) -> Array:  # fmt: skip
    """The losses of tokens; ``mean_ratio`` is the logarithm of their sequences' ratios, if any.

    ``kept`` is 0 for tokens that have only the divergence's loss.
    """
    ratio = np.exp(logps - old if mean_ratio is None else mean_ratio)
    if loss_type == "sapo":
        tau = np.where(advantages > 0, *temperatures)
        loss = -4 / tau * sigmoid(tau * (ratio - 1)) * advantages
    else:
        clipped = np.clip(ratio, 1 - epsilon, 1 + epsilon_high)
        loss = -np.minimum(np.minimum(ratio, delta) * advantages, clipped * advantages)
    apart = reference - logps
    return loss * kept + beta * (np.exp(apart) - apart - 1) * (ratio if corrects else 1.0)


def has_high_entropy(entropies: Array, share: float) -> Array:
    """1 for tokens whose entropy is not below the quantile 1 - ``share`` of all, else 0."""
    return (entropies >= np.quantile(entropies, 1 - share)).astype(np.float64)
