"""What an evaluation says: which is the best; the threshold is patience's alone."""

import pytest

from qlora_wgpu.config import EvalConfig, TrainConfig
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.ops.preference import METRICS
from qlora_wgpu.training.checkpoints import RunState
from qlora_wgpu.training.step_log import answer_metrics


def test_the_lowest_is_the_best_whatever_the_threshold():
    state = RunState()
    losses = [5.0, 4.9, 4.8, 4.5, 4.6, 4.4]
    settings = EvalConfig(early_stopping_threshold=0.3)
    lowest = [state.evaluated(loss, loss, step, settings) for step, loss in enumerate(losses)]
    assert lowest == [True, True, True, True, False, True]
    assert (state.best_loss, state.best_step) == (4.4, 5)


def test_patience_counts_falls_above_the_threshold():
    """As in transformers: each loss is compared with the lowest before it."""
    state, counts = RunState(), []
    settings = EvalConfig(early_stopping_threshold=0.25)
    for step, loss in enumerate([5.0, 4.9, 4.8, 4.4, 4.6, 4.1, 4.1]):
        state.evaluated(loss, loss, step, settings)
        counts.append(state.without_gain)
    assert counts == [0, 1, 2, 0, 1, 0, 1]


@pytest.mark.parametrize("sign", [1, -1])
def test_another_figure_may_say_what_is_best(sign):
    """Rewards may be below 0; the loss is recorded as well."""
    state, counts, best = RunState(), [], []
    settings = EvalConfig(
        metric_for_best_model="eval_rewards/margins", early_stopping_threshold=0.25,
        greater_is_better=None if sign > 0 else False,
    )  # fmt: skip
    for step, margin in enumerate([-0.5, -0.4, 0.2, 0.1, 0.5, 0.4]):
        best.append(state.evaluated(step + 1.0, sign * margin, step, settings))
        counts.append(state.without_gain)
    assert best == [True, True, True, False, True, False] and counts == [0, 1, 0, 1, 0, 1]
    assert (state.best_loss, state.best_figure, state.best_step) == (5.0, sign * 0.5, 4)
    assert (state.eval_loss, state.eval_step) == (6.0, 5)


def test_an_older_versions_best_goes_by_its_loss():
    state = RunState.from_json('{"step": 4, "best_loss": 2.5, "best_step": 3}', "x")
    assert (state.best_figure, state.aim) == (2.5, "lowest loss")
    assert not state.evaluated(2.6, 2.6, 5, EvalConfig())
    assert state.evaluated(2.4, 2.4, 6, EvalConfig())


def test_it_comes_back_bit_by_bit():
    state = RunState(
        step=3,
        window=[(0.1 + 0.2, 3.0, 2.0, 0.5), (0.5, 1.0, None, 0.0)],
        best_loss=1 / 3,
        best_figure=2 / 3,
        aim="highest rewards/margins",
        finished=True,
    )
    assert RunState.from_json(state.to_json(), "x") == state
    with pytest.raises(CheckpointError, match="x is damaged"):
        RunState.from_json('{"step": 1, "other": 2}', "x")


def test_an_older_versions_metrics_are_gone_on_with():
    """It stored no hits of chosen answers: those of the steps since then are reported."""
    older = METRICS[: METRICS.index("correct_tokens")]
    state = RunState(metrics=[2.0] * len(older))
    assert "mean_token_accuracy" not in answer_metrics(TrainConfig(objective="dpo"), state.metrics)
    state.add_metrics([1.0] * (len(METRICS) - 1) + [4.0])
    shown = answer_metrics(TrainConfig(objective="dpo"), state.metrics)
    assert (shown["mean_token_accuracy"], shown["rewards/accuracies"]) == (0.25, 1.0)
