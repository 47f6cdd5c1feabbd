"""Warnings about the weights of KTO's desirable and undesirable answers."""

import numpy as np
import pytest

from qlora_wgpu.config import TrainConfig
from qlora_wgpu.data import Dataset, Example
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.training.data import check_unpaired_balance
from qlora_wgpu.training.observers import Observer


class Heard(Observer):
    """Keeps warnings."""

    def __init__(self):
        self.warnings = []

    def warning(self, text):
        self.warnings.append(text)


def told(good, bad, **weights):
    answer, nothing = np.arange(3, dtype=np.int32), np.zeros(0, np.int32)
    sides = [*[(answer, nothing)] * good, *[(nothing, answer)] * bad]
    dataset = Dataset([Example(ids, ids) for pair in sides for ids in pair])
    heard = Heard()
    check_unpaired_balance(dataset, TrainConfig(objective="kto", **weights), heard)
    return heard.warnings


def test_a_weight_of_zero_is_told():
    (warning,) = told(3, 2, desirable_weight=0)
    assert "train.desirable_weight is 0: the 3 desirable answers are not trained on" in warning
    (warning,) = told(3, 2, undesirable_weight=0)
    assert "the 2 undesirable answers" in warning


def test_answers_that_have_the_weight_zero_alone_are_refused():
    with pytest.raises(ConfigError, match="undesirable_weight is 0 for all answers"):
        told(0, 4, undesirable_weight=0)
    assert not told(4, 0, undesirable_weight=0)


@pytest.mark.parametrize(
    ("good", "bad", "weights", "is_told"),
    [
        (5, 5, {}, False),
        (5, 5, {"desirable_weight": 3.0}, False),  # as in TRL, which looks at unequal numbers alone
        (6, 4, {}, True),
        (4, 6, {"desirable_weight": 1.6}, False),
        (4, 6, {"desirable_weight": 2.1}, True),
        (6, 4, {"undesirable_weight": 1.2}, False),
        (7, 0, {}, False),
    ],
)
def test_weights_that_balance_unequal_numbers(good, bad, weights, is_told):
    assert bool(told(good, bad, **weights)) == is_told


def test_the_weights_that_are_advised_are_within_the_bounds():
    (warning,) = told(6, 4)
    assert "train.desirable_weight from 0.667 to 0.887" in warning
    assert "train.undesirable_weight from 1.13 to 1.5" in warning
    for weights in ({"desirable_weight": 0.8}, {"undesirable_weight": 1.3}):
        assert not told(6, 4, **weights)
