"""Advantages and metrics of rewards, against TRL's formulas written out."""

import numpy as np
import pytest

from qlora_wgpu.grpo.advantages import AdvantageConfig, score

REWARDS = np.array([[1.0, 0.0], [0.0, np.nan], [0.5, 2.0], [np.nan, np.nan],
                    [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])  # fmt: skip
WEIGHTS = np.array([1.0, 0.5])
TOTALS = np.array([1.0, 0.0, 1.5, np.nan, 1.5, 1.5, 1.5, 1.5])


def test_each_completion_is_compared_with_its_group():
    made = score(REWARDS, WEIGHTS, AdvantageConfig(4))
    mean, std = np.mean([1.0, 0.0, 1.5]), np.std([1.0, 0.0, 1.5], ddof=1)
    expected = (np.array([1.0, 0.0, 1.5]) - mean) / (std + 1e-4)
    np.testing.assert_allclose(made.advantages, [*expected, 0.0, 0, 0, 0, 0], atol=1e-12)
    np.testing.assert_array_equal(made.totals, TOTALS)
    assert made.has_no_spread.tolist() == [False] * 4 + [True] * 4


@pytest.mark.parametrize("scale", ["batch", "none"])
def test_other_scales(scale):
    made = score(REWARDS, WEIGHTS, AdvantageConfig(4, scale))
    plain = np.nan_to_num(TOTALS - np.repeat([np.mean([1.0, 0.0, 1.5]), 1.5], 4), nan=0.0)
    divisor = np.nanstd(TOTALS, ddof=1) + 1e-4 if scale == "batch" else 1.0
    np.testing.assert_allclose(made.advantages, plain / divisor, atol=1e-12)


def test_functions_may_be_normalized_before_they_are_added():
    made = score(REWARDS[4:], WEIGHTS, AdvantageConfig(4, "group", "normalize_then_sum"))
    assert not made.advantages.any() and made.has_no_spread.all()
    rewards = np.array([[0.0, 3.0], [1.0, 1.0], [2.0, 2.0], [5.0, 2.0]])
    made = score(rewards, WEIGHTS, AdvantageConfig(2, "group", "normalize_then_sum"))
    each = rewards.reshape(2, 2, 2)
    normal = (each - each.mean(1, keepdims=True)) / (each.std(1, ddof=1, keepdims=True) + 1e-4)
    totals = normal.reshape(4, 2) @ WEIGHTS
    expected = (totals - totals.mean()) / (totals.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(made.advantages, expected, atol=1e-12)


def test_metrics_have_trl_s_names():
    metrics = score(REWARDS, WEIGHTS, AdvantageConfig(4)).metrics(["right", "short"])
    assert metrics["rewards/right/mean"] == pytest.approx(5.5 / 7)
    assert metrics["reward"] == pytest.approx(np.nanmean(TOTALS))
    assert metrics["reward_std"] == pytest.approx(np.nanstd(TOTALS, ddof=1))
    assert metrics["frac_reward_zero_std"] == 0.5


def test_rloo_compares_with_the_mean_of_the_others():
    rewards = np.array([[1.0], [2.0], [6.0], [np.nan], [3.0], [3.0], [3.0], [3.0]])
    penalties = np.array([0.0, 1.0, 0.0, 5.0, 0.0, 0.0, 0.0, 4.0])
    given = AdvantageConfig(4, leave_one_out=True, reward_clip_range=(0.0, 5.0))
    made = score(rewards, np.ones(1), given, penalties)
    # clipped, then less the penalties: 1, 1, 5, none; 3, 3, 3, -1
    expected = [1 - 3, 1 - 3, 5 - 1, 0, 3 - 5 / 3, 3 - 5 / 3, 3 - 5 / 3, -1 - 3]
    np.testing.assert_allclose(made.advantages, expected, atol=1e-12)
    normalized = score(
        rewards, np.ones(1), AdvantageConfig(4, leave_one_out=True, normalize_advantages=True)
    ).advantages
    plain = score(rewards, np.ones(1), AdvantageConfig(4, leave_one_out=True)).advantages
    present = np.delete(plain, 3)
    own = (present - present.mean()) / (present.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(np.delete(normalized, 3), own, atol=1e-12)
    assert made.metrics(["a"])["reward"] == pytest.approx(np.nanmean(rewards))
