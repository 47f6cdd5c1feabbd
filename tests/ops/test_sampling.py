"""Tokens are chosen as the reference chooses them, and alike beside any other texts."""

import numpy as np
import pytest
from support.harness import PROFILES, Bench, assert_checked

from qlora_wgpu.ops import sampling
from qlora_wgpu.selfcheck.cases.common import arguments_of
from qlora_wgpu.selfcheck.cases.new_tokens import new_tokens
from qlora_wgpu.selfcheck.cases.texts import Row, check_choice, check_choice_after_a_prompt

VOCAB = 50


def chosen(device, profile, logits, rows, seeds, steps, seen=()):
    bench = Bench(device, "float32", PROFILES[profile])
    bits = sampling.make_seen(len(rows), logits.shape[1])
    bits.storage.data = np.tile(sampling.seen_words(seen, logits.shape[1]), len(rows))
    choices = sampling.make_choices(len(rows), bits)
    choices.settings.storage.data = sampling.encode_choices(rows, seeds, steps).view(np.float32)
    sampling.choose(bench.graph, bench.given(logits), new_tokens(len(rows)), choices)
    tokens, after = bench.run(choices.chosen, bits)
    return tokens.astype(int)[: len(rows)], after.astype(np.uint32).reshape(len(rows), -1)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("arguments", [(49_155, True), (1000, False, 7)])
def test_as_the_reference(device, profile, arguments):
    bench = Bench(device, "float32", PROFILES[profile])
    check_choice(bench, *arguments)
    assert bench.excess <= 1.0


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("arguments", arguments_of(check_choice_after_a_prompt))
def test_a_prompts_first_token_is_as_the_reference(device, profile, arguments):
    assert_checked(device, profile, "float32", check_choice_after_a_prompt, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_probabilities(device, profile):
    """1,000 draws of 6 tokens: each share within four standard deviations."""
    count, logits = 1000, np.array([1.0, 0.0, -1.0, 2.0, 0.5, -3.0])
    rows = [Row(0.8, top_k=4, top_p=0.9)] * count
    tokens, _ = chosen(
        device, profile, np.tile(logits, (count, 1)), rows, [5] * count, range(count)
    )
    p = np.exp(logits / 0.8)
    p[[2, 5]] = 0  # of four, three have 0.9
    p[1] = 0
    p /= p.sum()
    shares = np.bincount(tokens, minlength=6) / count
    assert (np.abs(shares - p) <= 4 * np.sqrt(p * (1 - p) / count)).all(), (shares, p)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("top_k", [1, 2])
def test_no_token_beyond_the_likeliest_k(device, profile, top_k):
    count, logits = 60, np.random.default_rng(3).standard_normal(VOCAB) / 10
    rows = [Row(2.0, top_k=top_k)] * count
    tokens, _ = chosen(
        device, profile, np.tile(logits, (count, 1)), rows, range(count), range(count)
    )
    assert set(tokens) == set(np.argsort(-logits)[:top_k])


def test_a_row_is_chosen_alike_beside_any_others(device):
    random = np.random.default_rng(0)
    logits = random.standard_normal((5, VOCAB))
    rows = [Row(), Row(0.5, top_k=3), Row(0.0), Row(2.0, top_p=0.5), Row(1.5, min_p=0.1)]
    together, _ = chosen(device, "texture", logits, rows, range(5), range(5))
    for i in range(5):
        alone, _ = chosen(device, "texture", logits[i : i + 1], rows[i : i + 1], [i], [i])
        assert alone[0] == together[i]


def test_seen_tokens_are_penalized_and_noted(device):
    logits = np.zeros((1, VOCAB))
    logits[0, [7, 9]] = 3.0, 2.0
    greedy, _ = chosen(device, "texture", logits, [Row(0.0)], [0], [0], seen=[7])
    assert greedy == [7]
    other, after = chosen(
        device, "gpu", logits, [Row(0.0, repetition_penalty=2.0)], [0], [0], seen=[7]
    )
    assert other == [9]
    assert np.array_equal(after[0], sampling.seen_words([7, 9], VOCAB))


def test_what_is_not_finite_is_told(device):
    logits = np.zeros((3, VOCAB))
    logits[0, 3], logits[2, 49] = np.nan, np.inf
    tokens, _ = chosen(device, "cpu", logits, [Row(0.0)] * 3, [0] * 3, [0] * 3)
    assert tokens.tolist() == [sampling.NONE, 0, sampling.NONE]
