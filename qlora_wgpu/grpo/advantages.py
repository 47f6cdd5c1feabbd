"""Advantages of completions within their groups, and TRL's metrics of rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_EPSILON = 1e-4  # next to a standard deviation, as in TRL
_ZERO = 1e-8  # of a standard deviation: torch.isclose's


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages, by TRL's names."""

    num_generations: int  # completions of a group
    scale_rewards: Literal["group", "batch", "none"] = "group"
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    leave_one_out: bool = False  # whether the baseline is the mean of the others (RLOO)
    normalize_advantages: bool = False  # whether RLOO's are normalized over all completions
    reward_clip_range: tuple[float, float] | None = None  # of RLOO's rewards


@dataclass(frozen=True, eq=False)
class Scores:
    """The rewards of completions that were sampled together, and their advantages."""

    rewards: Array  # (completions, functions); NaN where a function gives none
    weights: Array  # (functions,)
    advantages: Array  # (completions,); 0 where no function gives a reward
    has_no_spread: npt.NDArray[np.bool_]  # (completions,): whether the divisor is zero

    @property
    def totals(self) -> Array:
        """The weighted sum of each completion's rewards; NaN without any."""
        return _totals(self.rewards, self.weights)

    def metrics(self, names: list[str]) -> dict[str, float]:
        """Means and deviations over all completions, by TRL's names; of functions by theirs."""
        shown = {}
        for name, rewards in zip(names, self.rewards.T, strict=True):
            shown[f"rewards/{name}/mean"] = _mean(rewards)
            shown[f"rewards/{name}/std"] = _std(rewards)
        totals = self.totals
        return shown | {
            "reward": _mean(totals),
            "reward_std": _std(totals),
            "frac_reward_zero_std": float(self.has_no_spread.mean()),
        }


def score(
    rewards: Array, weights: Array, config: AdvantageConfig, penalties: Array | None = None
) -> Scores:
    """Compares each completion with its group; the completions of a group are consecutive.

    Args:
        rewards: (completions, functions); NaN where a function gives no reward.
        weights: (functions,).
        config: How rewards are scaled and added up.
        penalties: (completions,), subtracted from RLOO's rewards; by default none.
    """
    size = config.num_generations
    if config.leave_one_out:
        return _leave_one_out(rewards, weights, config, penalties)
    if config.multi_objective_aggregation == "normalize_then_sum":
        grouped = rewards.reshape(-1, size, rewards.shape[1])
        normalized = np.stack([_normalized(group) for group in grouped]).reshape(rewards.shape)
        totals = _totals(normalized, weights, rewards)
        spread = np.full(len(totals), _std(totals) if len(totals) > 1 else 0.0)
        advantages = (totals - _mean(totals)) / (spread + _EPSILON)
    else:
        totals = _totals(rewards, weights)
        groups = totals.reshape(-1, size)
        spread = np.repeat([_std(group) if size > 1 else 0.0 for group in groups], size)
        if config.scale_rewards == "batch":
            spread = np.full(len(totals), _std(totals) if len(totals) > 1 else 0.0)
        advantages = totals - np.repeat([_mean(group) for group in groups], size)
        if config.scale_rewards != "none":
            advantages = advantages / (spread + _EPSILON)
    return Scores(rewards, weights, np.nan_to_num(advantages, nan=0.0), np.abs(spread) <= _ZERO)


def _leave_one_out(
    rewards: Array, weights: Array, config: AdvantageConfig, penalties: Array | None
) -> Scores:
    totals = _totals(rewards, weights)
    if config.reward_clip_range is not None:
        totals = np.clip(totals, *config.reward_clip_range)
    if penalties is not None:
        totals = totals - penalties
    size = config.num_generations
    groups = totals.reshape(-1, size)
    spread = np.repeat([_std(group) if size > 1 else 0.0 for group in groups], size)
    others = (~np.isnan(groups)).sum(axis=1, keepdims=True) - 1
    with np.errstate(invalid="ignore", divide="ignore"):
        baselines = (np.nansum(groups, axis=1, keepdims=True) - groups) / others
    advantages = totals - baselines.reshape(-1)
    if size == 1:
        advantages = np.zeros(len(totals))
    if config.normalize_advantages:
        advantages = (advantages - _mean(advantages)) / (_std(advantages) + _EPSILON)
    return Scores(rewards, weights, np.nan_to_num(advantages, nan=0.0), np.abs(spread) <= _ZERO)


def _totals(rewards: Array, weights: Array, given: Array | None = None) -> Array:
    totals: Array = np.nansum(rewards * weights, axis=1)
    totals[np.isnan(rewards if given is None else given).all(axis=1)] = np.nan
    return totals


def _normalized(group: Array) -> Array:
    means = np.array([_mean(column) for column in group.T])
    spreads = np.array([_std(column) if len(group) > 1 else 0.0 for column in group.T])
    normalized: Array = (group - means) / (spreads + _EPSILON)
    return normalized


def _mean(values: Array) -> float:
    present = values[~np.isnan(values)]
    return float(present.mean()) if len(present) else float("nan")


def _std(values: Array) -> float:
    """With Bessel's correction; NaN of fewer than two."""
    present = values[~np.isnan(values)]
    return float(present.std(ddof=1)) if len(present) > 1 else float("nan")
