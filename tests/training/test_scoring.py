"""The objective of scores from the settings, and a classifier's metrics."""

import numpy as np
import pytest

from qlora_wgpu.config import Config, TrainConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.ops.score import Scoring
from qlora_wgpu.training.preferences import scoring_of, training_options
from qlora_wgpu.training.scoring import Confusion, check_head, with_labels

pytestmark = pytest.mark.quick


def test_settings_become_an_objective():
    given = {"labels": ["a", "b"], "class_weights": [1.0, 2.5]}
    found = scoring_of(TrainConfig(objective="classification", **given))
    assert (found.classes, found.class_weights, found.labels) == (2, (1.0, 2.5), ("a", "b"))
    reward = TrainConfig(objective="reward", center_rewards_coefficient=0.01)
    assert scoring_of(reward).center == 0.01 and scoring_of(reward).width == 1
    assert training_options(reward).objective.scoring == scoring_of(reward)
    regression = TrainConfig(objective="classification", problem_type="regression")
    assert (scoring_of(regression).classes, scoring_of(regression).width) == (1, 1)
    assert scoring_of(TrainConfig()) is None is scoring_of(TrainConfig(objective="dpo"))


def test_confusion_and_macro_f1():
    """F1 of 2/3, 3/4 and 0, by hand."""
    true, predicted = [0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]
    scores = np.eye(3, dtype=np.float32)[predicted]
    targets = np.array(true, np.float32)[:, None]
    found = Confusion.of(scores, targets, Scoring("classification", 3))
    wide = np.pad(scores, ((0, 0), (0, 1)))
    absent = Confusion.of(wide, targets, Scoring("classification", 4))
    assert absent.macro_f1 == found.macro_f1
    assert found.matrix.tolist() == [[1, 1, 0], [0, 3, 0], [0, 1, 0]]
    assert found.macro_f1 == pytest.approx((2 / 3 + 3 / 4 + 0) / 3)


def test_confusion_of_several_labels():
    scores = np.array([[1, -1], [1, 1], [-1, -1]], np.float32)
    targets = np.array([[1, 0], [0, 1], [1, 0]], np.float32)
    given = Scoring("classification", 2, "multi_label_classification")
    found = Confusion.of(scores, targets, given)
    assert found.matrix.tolist() == [[[0, 1], [1, 1]], [[2, 0], [0, 1]]]
    assert found.macro_f1 == pytest.approx((1 / 2 + 1) / 2)


def test_labels_of_the_data():
    config = Config(model={"path": "m"}, train={"objective": "classification"})
    rows = [{"text": "a", "label": 10}, {"text": "b", "label": 0}]
    assert with_labels(config, rows).train.labels == [str(number) for number in range(11)]
    with pytest.raises(ConfigError, match="at least two labels, but there is only one"):
        with_labels(config, rows[1:])
    weighted = {"objective": "classification", "class_weights": [1.0, 2.0]}
    config = Config(model={"path": "m"}, train=weighted)
    with pytest.raises(ConfigError, match="must have 11 weights, one per label, got 2"):
        with_labels(config, rows)


@pytest.mark.parametrize(
    ("objective", "classes", "message"),
    [
        ("reward", 0, "requires num_labels=1 .*has a language model's head"),
        ("reward", 3, "requires num_labels=1 .*has a head with num_labels=3"),
        ("sft", 1, "requires a language model, but the model has a head with num_labels=1"),
    ],
)
def test_heads_that_do_not_fit(objective, classes, message):
    with pytest.raises(ConfigError, match=message):
        check_head(TrainConfig(objective=objective), classes)
