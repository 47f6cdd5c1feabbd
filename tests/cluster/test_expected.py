"""What an owner takes for an answer of a worker, and what it refuses by name."""

from dataclasses import replace

import numpy as np
import pytest

from qlora_wgpu.cluster.blocks import (
    BlockRequest,
    BlockResult,
    Expected,
    SampledTokens,
    Samples,
    WrongAnswerError,
    check_completions,
    check_parameters,
    check_text,
    expected,
    expected_loss,
)
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.model.steps import PolicyInputs, PreferenceInputs, ScoreInputs
from qlora_wgpu.ops.loss import PLAIN, Objective
from qlora_wgpu.ops.preference import METRICS, Preference
from qlora_wgpu.ops.score import Scoring
from qlora_wgpu.training.executor import MicroBatch

ASKED = BlockRequest(version=3, nonce=17)


def floats(length, value=1.0):
    return np.full(length, value, np.float32)


FORMS = {
    "gradient": (Expected(4, gradient=8), BlockResult(2.0, 4.0, 0, 0.1, floats(8), nonce=17)),
    "loss": (Expected(4), BlockResult(2.0, 4.0, 0, 0.1, nonce=17)),
    "weighted": (Expected(4, True, 8), BlockResult(2.0, 4.0 + 1e-4, 0, 0.1, floats(8), nonce=17)),
    "metrics": (
        Expected(2, gradient=8, has_metrics=True),
        BlockResult(2.0, 2.0, 0, 0.1, floats(8), metrics=floats(len(METRICS)), nonce=17),
    ),
    "logps": (Expected(0, logps=3), BlockResult(0.0, 0.0, 0, 0.1, logps=floats(3), nonce=17)),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_to_what_was_asked_is_taken(form):
    right, sums = FORMS[form]
    assert right.check(ASKED, sums) is sums


@pytest.mark.parametrize(
    ("form", "change", "says"),
    [
        *((form, {"nonce": 16}, "the result of another block") for form in FORMS),
        *((form, {"seconds": np.nan}, "it reported nan seconds") for form in FORMS),
        ("gradient", {"gradient": floats(7)}, "its gradient has 7 values, expected 8"),
        ("gradient", {"gradient": None}, "its gradient is nothing, expected an array"),
        ("gradient", {"gradient": np.ma.array(floats(8))}, "expected an array"),
        ("gradient", {"tokens": 3.0}, "it counted 3 tokens, expected 4"),
        ("gradient", {"metrics": floats(len(METRICS))}, "has metrics, expected none"),
        ("loss", {"gradient": floats(8)}, "has gradient, expected none"),
        ("loss", {"saturated": -1}, "saturated values is invalid: -1"),
        ("loss", {"saturated": 0.5}, "saturated values is invalid: 0.5"),
        ("loss", {"loss": "2"}, "its loss is a value of type str, expected a number"),
        ("loss", {"correct": None}, "its correct is nothing, expected a number"),
        ("weighted", {"tokens": 4.01}, "it counted 4.01 tokens, expected 4"),
        ("weighted", {"tokens": np.nan}, "it counted nan tokens, expected 4"),
        ("metrics", {"metrics": None}, "its metrics is nothing, expected an array"),
        ("metrics", {"metrics": floats(1)}, f"its metrics has 1 values, expected {len(METRICS)}"),
        ("logps", {"logps": floats(2)}, "its log probabilities has 2 values, expected 3"),
        ("logps", {"logps": floats((3, 1))}, "its log probabilities has 3 × 1 values"),
        ("logps", {"logps": np.ones(3)}, "its log probabilities is float64, expected float32"),
    ],
)
def test_what_is_no_answer_to_it_is_named(form, change, says):
    right, sums = FORMS[form]
    with pytest.raises(WrongAnswerError) as caught:
        right.check(ASKED, replace(sums, **change))
    assert says in str(caught.value)


@pytest.mark.parametrize("answer", [None, {"nonce": 17}, 4.0, [1, 2]])
def test_what_are_no_sums_is_named(answer):
    with pytest.raises(WrongAnswerError, match="instead of a block's result"):
        Expected(4).check(ASKED, answer)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (floats(7), "its adapter has 7 values, expected 8"),
        (np.ones(8), "is float64"),
        (None, "its adapter is nothing"),
        (floats(8, np.inf), "contains NaN or infinity"),
        (np.r_[floats(7), np.float32("nan")], "contains NaN or infinity"),
    ],
)
def test_an_adapter_from_a_worker_is_whole_and_finite(values, says):
    assert check_parameters(floats(8), 8) is not None
    with pytest.raises(WrongAnswerError, match=says):
        check_parameters(values, 8)


@pytest.mark.parametrize("ids", [None, "12", [1, "2"], [1, 2.5], [1, 9], [-1], [1, 2, 3, 4]])
def test_tokens_from_a_worker_are_of_the_vocabulary(ids):
    assert check_text([1, np.int64(8)], 3, 9) == [1, 8]
    with pytest.raises(WrongAnswerError, match="it generated"):
        check_text(ids, 3, 9)


def batch_of(labels, **more):
    labels = np.array(labels)
    return MicroBatch(np.zeros_like(labels), labels, None, 1, 0, **more)


def test_label_tokens_are_counted_by_the_owner():
    labels = np.array([[-100, 5, 6, -100]])
    weights = np.array([[9.0, 2.0, 0.5, 9.0]], np.float32)
    by_tokens = expected("gradient", batch_of(labels), 8, PLAIN)
    assert (by_tokens.tokens, by_tokens.gradient, by_tokens.is_weighted) == (2, 8, False)
    by_loss = expected_loss(labels, np.ones((1, 4)))
    assert (by_loss.tokens, by_loss.gradient, by_loss.has_metrics) == (2, None, False)
    by_weights = expected("evaluate", batch_of(labels, weights=weights), 8, PLAIN)
    assert (by_weights.tokens, by_weights.gradient, by_weights.is_weighted) == (2.5, None, True)


@pytest.mark.parametrize(
    ("preference", "count"),
    [(Preference("dpo", "sigmoid"), 3), (Preference("kto", "kto"), 6), (None, 0)],
)
def test_answers_are_counted_in_pairs_or_alone(preference, count):
    given = batch_of(np.full((6, 2), -100), samples=PreferenceInputs.plain(6))
    form = expected("gradient", given, 8, Objective(preference=preference))
    assert (form.tokens, form.gradient, form.has_metrics) == (count, 8, True)


def test_completions_count_by_their_shares():
    shares = np.array([1.5, 0.25], np.float32)
    given = batch_of([[1, 2], [3, -100]], samples=PolicyInputs(shares, *[None] * 5))
    form = expected("gradient", given, 8, PLAIN)
    assert (form.tokens, form.gradient, form.is_weighted) == (1.75, 8, True)


@pytest.mark.parametrize(
    ("scoring", "tokens"),
    [
        (Scoring("reward"), 2),
        (Scoring("classification", 3), 4),
        (Scoring("classification", 3, class_weights=(0.5, 2.0, 1.25)), 4.25),
    ],
)
def test_sequences_count_in_pairs_alone_or_by_weights(scoring, tokens):
    samples = ScoreInputs(np.arange(4), np.float32([[0], [1], [0], [2]]))
    given, objective = batch_of(np.full((4, 2), -100), samples=samples), Objective(scoring=scoring)
    form = expected("gradient", given, 8, objective)
    assert (form.tokens, form.gradient, form.scores) == (tokens, 8, None)
    assert form.is_weighted is bool(scoring.class_weights)
    form = expected("scores", given, 8, objective)
    assert (form.tokens, form.gradient, form.scores) == (tokens, None, 4 * scoring.classes)


def test_log_probabilities_and_the_divergence_have_no_tokens():
    given = batch_of([[1, 1], [1, 1]], samples=PreferenceInputs.plain(5))
    assert expected("answer_logps", given, 8, PLAIN) == Expected(0, logps=5)
    assert expected("token_logps", given, 8, PLAIN) == Expected(0, logps=4)
    assert expected("divergence", given, 8, PLAIN) == Expected(0, has_metrics=True)


SAMPLED = SampledTokens(np.array([4, 2, 5, 6, 7], np.int32), np.array([2, 3], np.int32), 17)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nonce": 16}, "the completions of another block"),
        ({"ids": SAMPLED.ids.astype(np.int64)}, "list of tokens is int64, expected int32"),
        ({"ids": SAMPLED.ids[:-1]}, "list of tokens has 4 values, expected 5"),
        ({"ids": np.array([4, 2, 5, 6, 9], np.int32)}, "contain invalid token ids"),
        ({"ids": np.array([4, 2, 5, 6, -1], np.int32)}, "contain invalid token ids"),
        ({"ids": np.array([4, 2, 5, 2, 7], np.int32)}, "with tokens after its end"),
        ({"ids": np.array([4, 3, 5, 6, 7], np.int32)}, "a completion without an end"),
        ({"lengths": np.array([5], np.int32)}, "list of lengths has 1 values, expected 2"),
        ({"lengths": np.array([1, 4], np.int32)}, "do not have 1 to 3 tokens"),
        ({"lengths": np.array([0, 3], np.int32)}, "do not have 1 to 3 tokens"),
        ({"lengths": [2, 3]}, "list of lengths is a value of type list"),
    ],
)
def test_completions_of_a_worker_are_whole(change, says):
    given = Samples([[1], [1]], [7, 8], Sampling(1.0), 3, frozenset([2]))
    assert check_completions(ASKED, SAMPLED, given, 9) == [[4, 2], [5, 6, 7]]
    with pytest.raises(WrongAnswerError) as caught:
        check_completions(ASKED, replace(SAMPLED, **change), given, 9)
    assert says in str(caught.value)


def test_what_are_no_completions_is_named():
    given = Samples([[1]], [7], Sampling(1.0), 3, frozenset([2]))
    with pytest.raises(WrongAnswerError, match="of type list instead of completions"):
        check_completions(ASKED, [[4, 2]], given, 9)
