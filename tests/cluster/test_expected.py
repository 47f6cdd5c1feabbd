"""What is known of an answer before it comes: one that differs is not used, and says how."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.cluster.blocks import Sums
from qlora_wgpu.cluster.expected import (
    Expected,
    WrongAnswerError,
    check_parameters,
    check_text,
    expected,
)
from qlora_wgpu.ops.preference import METRICS

ASKED = SimpleNamespace(nonce=7)
GRADIENT, METRIC = np.ones(5, np.float32), np.ones(len(METRICS), np.float32)
SUMS = Sums(2.0, 6.0, 0, 0.5, nonce=7)
TARGETS, MASK = [[-100, 3, 4], [5, -100, 6]], [[1, 1, 1], [1, 1, 0]]
WEIGHTS = np.array([[9, 0.5, 0.25], [1, 9, 2]], np.float32)


@pytest.mark.parametrize(("known", "sums"), [
    (Expected(6.0), SUMS),
    (Expected(6.0, gradient=5), replace(SUMS, gradient=GRADIENT)),
    (Expected(6.0, has_metrics=True), replace(SUMS, metrics=METRIC)),
    (Expected(6.0, answers=5), replace(SUMS, answers=GRADIENT)),
    (Expected(6.0, is_weighted=True), replace(SUMS, tokens=6.005, seconds=0)),
])  # fmt: skip
def test_an_answer_of_the_form_is_used(known, sums):
    assert known.check(ASKED, sums) is sums


@pytest.mark.parametrize(("known", "change", "told"), [
    (Expected(6.0), {"nonce": 8}, "sums of another block"),
    (Expected(6.0), {"tokens": 6.001}, "6.001 tokens, not 6"),
    (Expected(6.0, is_weighted=True), {"tokens": 6.1}, "6.1 tokens, not 6"),
    (Expected(6.0), {"tokens": float("nan")}, "nan tokens, not 6"),
    (Expected(6.0), {"gradient": GRADIENT}, "has gradient, for which nobody asked"),
    (Expected(6.0, gradient=5), {}, "its gradient is nothing, not an array"),
    (Expected(6.0, gradient=5), {"gradient": GRADIENT.astype(float)}, "float64, not float32"),
    (Expected(6.0, gradient=4), {"gradient": GRADIENT}, "has 5 values, not 4"),
    (Expected(6.0, gradient=5), {"gradient": GRADIENT[None]}, "has 1 × 5 values, not 5"),
    (Expected(6.0, has_metrics=True), {"metrics": GRADIENT[:1]}, "metrics has 1 values"),
    (Expected(6.0, answers=2), {"answers": GRADIENT}, "log probabilities has 5 values, not 2"),
    (Expected(6.0), {"loss": "2"}, "loss is .*, not a number"),
    (Expected(6.0), {"saturated": -1}, "-1 saturated values"),
    (Expected(6.0), {"saturated": 0.5}, "0.5 saturated values"),
    (Expected(6.0), {"seconds": -0.1}, "computed for -0.1 seconds"),
    (Expected(6.0), {"seconds": float("inf")}, "computed for inf seconds"),
])  # fmt: skip
def test_what_differs_is_told(known, change, told):
    with pytest.raises(WrongAnswerError, match=told):
        known.check(ASKED, replace(SUMS, **change))
    with pytest.raises(WrongAnswerError, match="in place of a block's sums"):
        known.check(ASKED, {"loss": 2.0})


def test_what_a_method_gives_follows_from_what_it_is_asked():
    def of(method, *more):
        return expected(method, ("ids", TARGETS, MASK, *more), 11, None)

    assert of("loss") == Expected(3.0)
    assert of("answer_logps", 4) == Expected(0.0, answers=4)
    assert of("divergence") == Expected(0.0, has_metrics=True)
    assert of("gradient", 0, None) == Expected(4.0, gradient=11, has_metrics=True)
    assert of("gradient", 0, WEIGHTS) == Expected(3.75, True, 11, has_metrics=True)
    assert of("measure", 0, None) == Expected(4.0, has_metrics=True)


def test_an_adapter_that_is_told_is_finite_and_whole():
    assert check_parameters(GRADIENT, 5) is GRADIENT
    with pytest.raises(WrongAnswerError, match="adapter has 5 values, not 6"):
        check_parameters(GRADIENT, 6)
    with pytest.raises(WrongAnswerError, match="not finite"):
        check_parameters(np.array([1, np.nan], np.float32), 2)


def test_a_text_is_of_the_vocabulary_and_no_longer_than_asked():
    assert check_text([0, np.int64(9), 3], 3, 10) == [0, 9, 3]
    for wrong in ((1, 2), [1.0], ["a"]):
        with pytest.raises(WrongAnswerError, match="in place of a list of tokens"):
            check_text(wrong, 3, 10)
    for wrong in ([1, 2, 3, 4], [10], [-1]):
        with pytest.raises(WrongAnswerError, match=f"{len(wrong)} tokens of 3"):
            check_text(wrong, 3, 10)
