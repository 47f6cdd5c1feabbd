"""References whose results are known without them."""

import numpy as np
import pytest

from qlora_wgpu.quant.quantized_weight import dynamic_quant_map
from qlora_wgpu.reference import altup, optimizers, policy, sampling
from qlora_wgpu.reference.optimizers import AdamW, AdamW8Bit, Lion, Quantized

RATES = {"lr": 0.5, "beta1": 0.5, "beta2": 0.75, "weight_decay": 0.25, "max_norm": 0.0}


def test_a_gradient_is_clipped_to_a_norm():
    g, norm = optimizers.clipped(np.array([6.0, 8.0]), 2, 2.5)
    assert norm == 5.0 and g == pytest.approx([1.5, 2.0], rel=1e-6)
    for most in (0.0, 10.0):
        g, norm = optimizers.clipped(np.array([6.0, 8.0]), 2, most)
        assert norm == 5.0 and g.tolist() == [3.0, 4.0]


def test_adamw_takes_a_step():
    state = AdamW(np.array([2.0]), np.array([0.0]), np.array([0.0]))
    norm = optimizers.adamw(state, np.array([8.0]), 2, 1, epsilon=1.0, **RATES)
    assert (norm, state.m[0], state.v[0]) == (4.0, 2.0, 4.0)  # and by their bias 4 and 16
    assert state.p[0] == pytest.approx(2 - 0.5 * 0.25 * 2 - 0.5 * 4 / (4 + 1))
    before = state.p.copy()
    assert optimizers.adamw(state, np.array([8.0]), 0, 2, epsilon=1.0, **RATES) == 0.0
    assert state.p == before
    optimizers.adamw(state, np.array([0.0]), 1, 2, epsilon=1.0, **RATES)
    assert (state.m[0], state.v[0]) == (1.0, 3.0)
    step = 0.5 * (1 / 0.75) / (np.sqrt(3 / (1 - 0.75**2)) + 1)
    assert state.p[0] == pytest.approx(before[0] * (1 - 0.125) - step)


def test_lion_steps_by_the_sign():
    state = Lion(np.array([2.0, 2.0]), np.array([4.0, -4.0]))
    norm, between = optimizers.lion(state, np.array([6.0, 8.0]), 2, **RATES)
    assert norm == 5.0 and between.tolist() == [3.5, 0.0]
    assert state.p == pytest.approx([2 * 0.875 - 0.5, 2 * 0.875])
    assert state.m == pytest.approx([0.75 * 4 + 0.25 * 3, -0.75 * 4 + 0.25 * 4])
    assert optimizers.lion(state, np.array([6.0, 8.0]), 0, **RATES)[0] == 0.0


@pytest.mark.parametrize("signed", [True, False])
def test_moments_get_the_nearest_code_of_their_block(signed):
    values = dynamic_quant_map(signed=signed).astype(np.float64)
    x = np.concatenate([values * 3, np.zeros(300), [1e-9]])
    made = Quantized.of(x, signed=signed)
    assert made.absmax == pytest.approx([3.0, 0.0, 1e-9]) and made.codes.size == x.size
    codes = made.codes[: len(values)]
    assert np.array_equal(codes[values >= 0], np.flatnonzero(values >= 0))
    assert made.values(signed=signed) == pytest.approx(x)
    assert not made.codes[len(values) + 1 : 512].any()
    zero = Quantized.zeros(257)
    assert (zero.codes.size, zero.absmax.size) == (257, 2)
    assert not zero.values(signed=signed).any()


def test_a_negative_element_never_gets_the_code_of_zero():
    values = dynamic_quant_map(signed=True)
    made = Quantized.of(np.array([1.0, -1e-12, 0.0, 1e-12]), signed=True)
    assert values[made.codes[1]] < 0 == values[made.codes[2]] == values[made.codes[3]]


def test_codes_are_kept_where_there_are_no_tokens():
    rates = {**RATES, "epsilon": 1.0}
    zeros = Quantized.zeros(1)
    state = AdamW8Bit(np.array([2.0]), zeros, Quantized.zeros(1))
    optimizers.adamw_8bit(state, np.array([8.0]), 0, 1, **rates)
    assert state.p[0] == 2.0 and state.m is zeros
    exact = optimizers.adamw_8bit(state, np.array([8.0]), 2, 1, **rates)
    assert state.p is exact.p and (exact.m[0], exact.v[0]) == (2.0, 4.0)
    assert state.m.values(signed=True)[0] == pytest.approx(2.0)
    assert state.v.values(signed=False)[0] == pytest.approx(4.0)


# ---- sampling ------------------------------------------------------------------------------------


def kept(logits, **given):
    """The tokens that stay, in order of their logits without noise."""
    plain = {"biases": {}, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
             "penalty": 1.0, "seed": 3, "step": 1, "seen": np.zeros(len(logits), bool)}  # fmt: skip
    given = plain | given
    x = sampling.scores(np.array(logits, np.float64), given.pop("seen"), **given)
    return np.flatnonzero(np.isfinite(x)).tolist()


LOGITS = np.log([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 2, 3]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.71}, [1, 2, 3]),
        ({"top_p": 0.95}, [0, 1, 2, 3]),
        ({"top_k": 2, "top_p": 0.5}, [1]),  # of what is left of 0.7
        ({"top_k": 2, "top_p": 0.6}, [1, 3]),
        ({"min_p": 0.49}, [1, 2, 3]),
        ({"min_p": 0.51}, [1, 3]),
        ({"min_p": 0.51, "temperature": 2.0}, [1, 2, 3]),
        ({"biases": {0: 5.0}, "top_k": 1}, [0]),
        ({"biases": {1: -5.0}, "top_k": 1}, [3]),
    ],
)
@pytest.mark.cover("all")
def test_tokens_that_are_unlikely_are_left_out(given, tokens):
    assert kept(LOGITS, **given) == tokens


def test_tokens_that_were_seen_are_less_likely():
    seen = np.array([True, True, False, False])
    plain = {"biases": {}, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
             "seed": 3, "step": 1}  # fmt: skip
    x = sampling.scores(np.array([-2.0, 2.0, -2.0, 2.0]), seen, penalty=2.0, **plain)
    assert x.tolist() == [-4.0, 1.0, -2.0, 2.0]


def test_noise_is_that_of_seed_and_step_and_as_often_large():
    draws = sampling.exponentials(4000, 5, 1)
    assert np.array_equal(draws, sampling.exponentials(4000, 5, 1)) and draws.min() > 0
    for other in ((6, 1), (5, 2), (5 + (1 << 32), 1)):
        assert not np.array_equal(draws, sampling.exponentials(4000, *other))
    assert draws.mean() == pytest.approx(1.0, abs=0.1) and np.median(draws) == pytest.approx(
        np.log(2), abs=0.1
    )


# ---- policies and streams ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "delta", "loss"),
    [
        (1.0, 2.0, np.inf, -2.0),
        (2.0, 2.0, np.inf, -2.6),  # clipped above
        (0.5, 2.0, np.inf, -1.0),
        (0.5, -2.0, np.inf, 1.6),  # clipped below
        (2.0, -2.0, np.inf, 4.0),
        (2.0, -2.0, 1.5, 3.0),
    ],
)
@pytest.mark.cover("all")
def test_ratios_are_clipped_to_the_worse_side(ratio, advantage, delta, loss):
    logps, old = np.array([np.log(ratio)]), np.zeros(1)
    given = (logps, old, logps, np.array([advantage]), "grpo", 0.0, 0.2, 0.3, delta)
    assert policy.token_losses(*given) == pytest.approx([loss])
    assert policy.token_losses(*given, kept=0.0) == pytest.approx([0.0])


@pytest.mark.parametrize(("corrects", "factor"), [(True, 2.0), (False, 1.0)])
def test_the_divergence_is_weighted_by_the_ratio_if_asked(corrects, factor):
    logps, old, reference = np.array([np.log(2.0)]), np.zeros(1), np.array([np.log(6.0)])
    given = (logps, old, reference, np.zeros(1), "grpo", 0.5, 0.2, 0.2)
    found = policy.token_losses(*given, corrects=corrects)
    assert found == pytest.approx([0.5 * (3 - np.log(3) - 1) * factor])


def test_tokens_of_high_entropy_are_a_share():
    entropies = np.arange(10.0)
    assert policy.has_high_entropy(entropies, 0.2).tolist() == [0.0] * 8 + [1.0] * 2
    assert policy.has_high_entropy(entropies, 1.0).all()


def test_streams_are_predicted_and_corrected():
    x, others = np.array([[1.0, 2.0]]), np.array([[10.0, 20.0], [100.0, 200.0]])
    coefs = np.zeros((1, 9))
    coefs[0, 0 * 3 + 1] = 0.5  # of the second in the first
    coefs[0, 1 * 3 + 2] = 2.0  # of the third in the second
    made, rest = altup.altup_predict(x, others, coefs, 1)
    assert made.tolist() == [[201.0, 402.0]]
    assert rest.tolist() == [[10.5, 21.0], [100.0, 200.0]]
    gains = np.array([[0.0, 1.0]])
    given = (np.array([[1.0], [2.0]]), np.array([[3.0]]), np.array([[5.0]]), gains)
    assert altup.altup_correct(*given, numbers=[0, 1]).tolist() == [[3.0], [6.0]]
    added = np.array([[0.5]])
    assert altup.altup_correct(*given, added, numbers=[0, 1]).tolist() == [[3.0], [6.5]]
    assert altup.altup_correct(given[0][:1], *given[1:], added, numbers=[1]).tolist() == [[5.5]]


def test_rows_are_scaled_to_the_size_of_others():
    x, like = np.array([[1.0, 1.0], [0.0, 0.0]]), np.array([[3.0, 3.0], [1.0, 1.0]])
    assert altup.rms_match(x, like, 1e-6).tolist() == [[3.0, 3.0], [0.0, 0.0]]
    assert altup.rms_match(x, like, 4.0).tolist() == [[1.5, 1.5], [0.0, 0.0]]
    assert altup.rms_match(x, like, 1e-6, x).tolist() == [[4.0, 4.0], [0.0, 0.0]]
