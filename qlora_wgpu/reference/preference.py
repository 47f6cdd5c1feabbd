"""Losses over answers' summed log probabilities: DPO's, ORPO's and KTO's."""

import numpy as np
import numpy.typing as npt

from qlora_wgpu.reference.pointwise import sigmoid
from qlora_wgpu.reference.tape import Array


def log_sigmoid(x: Array) -> Array:
    """log(1 / (1 + exp(-x)))."""
    return -np.logaddexp(0, -x)


def pairs(
    chosen: Array, rejected: Array, loss_type: str, counts: tuple[Array, Array], beta: float,
    smoothing: float = 0.0,
) -> Array:  # fmt: skip
    """DPO's losses of log ratios (policy to reference); ``counts`` are the answers' tokens."""
    m, n = counts
    x, xc, xr = beta * (chosen - rejected), beta * chosen, beta * rejected
    if loss_type == "sigmoid":
        return -log_sigmoid(x)
    if loss_type == "hinge":
        return np.maximum(1 - x, 0.0)
    if loss_type == "ipo":
        return np.square(chosen / m - rejected / n - 0.5 / beta)
    if loss_type == "robust":
        loss = smoothing * log_sigmoid(-x) - (1 - smoothing) * log_sigmoid(x)
        return loss / (1 - 2 * smoothing)
    if loss_type == "exo_pair":
        won = log_sigmoid(x) - np.log1p(-smoothing)
        lost = log_sigmoid(-x) - np.log(smoothing)
        return sigmoid(x) * won + sigmoid(-x) * lost
    if loss_type == "nca_pair":
        return -log_sigmoid(xc) - 0.5 * log_sigmoid(-xc) - 0.5 * log_sigmoid(-xr)
    if loss_type == "bco_pair":
        return -log_sigmoid(xc) - log_sigmoid(-xr)
    if loss_type == "sppo_hard":
        return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
    if loss_type == "apo_zero":
        return sigmoid(-xc) + sigmoid(xr)
    if loss_type == "apo_down":
        return sigmoid(xc) + sigmoid(-x)
    return -log_sigmoid(beta * (chosen / m - rejected / n))  # sigmoid_norm


def odds(chosen: Array, rejected: Array, beta: float) -> Array:
    """ORPO's odds-ratio term of mean log probabilities, without the chosen's likelihood."""
    return -beta * log_sigmoid(log_odds(chosen, rejected))


def log_odds(chosen: Array, rejected: Array) -> Array:
    """The log odds ratio of two answers, from their mean log probabilities."""
    return chosen - rejected - np.log(-np.expm1(chosen)) + np.log(-np.expm1(rejected))


def singles(
    ratios: Array, is_desirable: npt.NDArray[np.bool_], beta: float, divergence: float,
    weights: tuple[float, float],
) -> Array:  # fmt: skip
    """KTO's losses of log ratios."""
    sign, weight = np.where(is_desirable, 1.0, -1.0), np.where(is_desirable, *weights)
    return weight * sigmoid(-sign * beta * (ratios - divergence))
