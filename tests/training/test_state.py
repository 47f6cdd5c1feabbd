"""What an evaluation says: the lowest loss is the best; the threshold is patience's alone."""

import pytest

from qlora_wgpu.config.schema import TrainConfig
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.ops.preference import METRICS
from qlora_wgpu.training.state import RunState
from qlora_wgpu.training.step_log import answer_metrics


def test_the_lowest_is_the_best_whatever_the_threshold():
    state = RunState()
    losses = [5.0, 4.9, 4.8, 4.5, 4.6, 4.4]
    lowest = [state.evaluated(loss, step, 0.3) for step, loss in enumerate(losses)]
    assert lowest == [True, True, True, True, False, True]
    assert (state.best_loss, state.best_step) == (4.4, 5)


def test_patience_counts_falls_above_the_threshold():
    """As in transformers: each loss is compared with the lowest before it."""
    state, counts = RunState(), []
    for step, loss in enumerate([5.0, 4.9, 4.8, 4.4, 4.6, 4.1, 4.1]):
        state.evaluated(loss, step, 0.25)
        counts.append(state.without_gain)
    assert counts == [0, 1, 2, 0, 1, 0, 1]


def test_it_comes_back_bit_by_bit():
    state = RunState(
        step=3,
        window=[(0.1 + 0.2, 3.0, 2.0, 0.5), (0.5, 1.0, None, 0.0)],
        best_loss=1 / 3,
        finished=True,
    )
    assert RunState.from_json(state.to_json(), "x") == state
    with pytest.raises(CheckpointError, match="x is damaged"):
        RunState.from_json('{"step": 1, "other": 2}', "x")


def test_an_older_versions_metrics_are_gone_on_with():
    """It kept no hits of chosen answers: those of the steps since then are told."""
    older = METRICS[: METRICS.index("correct_tokens")]
    state = RunState(metrics=[2.0] * len(older))
    assert "mean_token_accuracy" not in answer_metrics(TrainConfig(objective="dpo"), state.metrics)
    state.add_metrics([1.0] * (len(METRICS) - 1) + [4.0])
    shown = answer_metrics(TrainConfig(objective="dpo"), state.metrics)
    assert (shown["mean_token_accuracy"], shown["rewards/accuracies"]) == (0.25, 1.0)
