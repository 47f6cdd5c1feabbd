"""Losses over answers' summed log probabilities, and their slopes: DPO's, ORPO's and KTO's."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Losses(NamedTuple):
    """Losses of pairs or samples, and each answer's slope, the chosen's in front."""

    losses: Array
    chosen: Array
    rejected: Array


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _log_sigmoid(x: Array) -> Array:
    return -np.logaddexp(0, -x)


def _slope(x: Array) -> Array:
    return _sigmoid(x) * _sigmoid(-x)


def pairs(
    loss_type: str, chosen: Array, rejected: Array, counts: tuple[Array, Array], beta: float,
    smoothing: float = 0.0,
) -> Losses:  # fmt: skip
    """DPO's losses of log ratios (policy to reference) of answers of so many tokens each."""
    m, n = counts
    x, xc, xr = beta * (chosen - rejected), beta * chosen, beta * rejected
    if loss_type == "sigmoid":
        slope = beta * _sigmoid(-x)
        return Losses(-_log_sigmoid(x), -slope, slope)
    if loss_type == "hinge":
        slope = np.where(x < 1, beta, 0.0)
        return Losses(np.maximum(1 - x, 0), -slope, slope)
    if loss_type == "ipo":
        apart = chosen / m - rejected / n - 0.5 / beta
        return Losses(apart**2, 2 * apart / m, -2 * apart / n)
    if loss_type == "robust":
        scale = 1 / (1 - 2 * smoothing)
        loss = smoothing * _log_sigmoid(-x) - (1 - smoothing) * _log_sigmoid(x)
        slope = beta * scale * ((1 - smoothing) * _sigmoid(-x) + smoothing * _sigmoid(x))
        return Losses(scale * loss, -slope, slope)
    if loss_type == "exo_pair":
        won = _log_sigmoid(x) - np.log1p(-smoothing)
        lost = _log_sigmoid(-x) - np.log(smoothing)
        slope = beta * _slope(x) * (won - lost)
        return Losses(_sigmoid(x) * won + _sigmoid(-x) * lost, slope, -slope)
    if loss_type == "nca_pair":
        loss = -_log_sigmoid(xc) - 0.5 * _log_sigmoid(-xc) - 0.5 * _log_sigmoid(-xr)
        return Losses(loss, beta * (0.5 * _sigmoid(xc) - _sigmoid(-xc)), 0.5 * beta * _sigmoid(xr))
    if loss_type == "bco_pair":
        loss = -_log_sigmoid(xc) - _log_sigmoid(-xr)
        return Losses(loss, -beta * _sigmoid(-xc), beta * _sigmoid(xr))
    if loss_type == "sppo_hard":
        won, lost = chosen - 0.5 / beta, rejected + 0.5 / beta
        return Losses(won**2 + lost**2, 2 * won, 2 * lost)
    if loss_type == "apo_zero":
        return Losses(_sigmoid(-xc) + _sigmoid(xr), -beta * _slope(xc), beta * _slope(xr))
    if loss_type == "apo_down":
        slope = beta * _slope(x)
        return Losses(_sigmoid(xc) + _sigmoid(-x), beta * _slope(xc) - slope, slope)
    z = beta * (chosen / m - rejected / n)  # sigmoid_norm
    slope = beta * _sigmoid(-z)
    return Losses(-_log_sigmoid(z), -slope / m, slope / n)


def odds(chosen: Array, rejected: Array, beta: float) -> Losses:
    """ORPO's term of mean log probabilities, without the chosen's likelihood."""
    ratio = log_odds(chosen, rejected)
    slope = beta * _sigmoid(-ratio)
    return Losses(
        -beta * _log_sigmoid(ratio), slope / np.expm1(chosen), -slope / np.expm1(rejected)
    )


def log_odds(chosen: Array, rejected: Array) -> Array:
    """The logarithm of the ratio of two answers' odds, of their mean log probabilities."""
    result: Array = chosen - rejected - np.log(-np.expm1(chosen)) + np.log(-np.expm1(rejected))
    return result


def singles(
    ratios: Array, is_desirable: npt.NDArray[np.bool_], beta: float, divergence: float,
    weights: tuple[float, float],
) -> tuple[Array, Array]:  # fmt: skip
    """KTO's losses of log ratios, and their slopes."""
    sign = np.where(is_desirable, 1.0, -1.0)
    weight = np.where(is_desirable, *weights)
    z = sign * beta * (ratios - divergence)
    return weight * _sigmoid(-z), -sign * weight * beta * _slope(z)
