"""Rotations of all kinds, against their formulas in float64."""

import math

import numpy as np
import pytest

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.parts import mamba, rope
from qlora_wgpu.families.parts.rope import RopeParameters, mrope_axes

DIM, THETA = 8, 10_000.0
PLAIN = np.array([THETA ** (-2 * pair / DIM) for pair in range(DIM // 2)])


def made(kind, *lengths, config=None, **values):
    """The angles for some lengths of a sample, and the factor."""
    own = {"rope_theta": THETA, **values}
    config = {"max_position_embeddings": 64} if config is None else config
    angles, factor = kind(RopeParameters(config, own, DIM))
    return [np.asarray(angles(length), np.float64) for length in lengths], factor


def assert_close(found, *expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5)


def test_plain_and_linear():
    found, factor = made(rope._default, 1, 999)
    assert_close(found, PLAIN, PLAIN)
    assert factor == 1.0
    found, factor = made(rope._linear, 1, 999, factor=4.0)
    assert_close(found, PLAIN / 4, PLAIN / 4)
    assert factor == 1.0
    huge, _ = made(rope._default, 1, rope_theta=1e300)
    assert np.isfinite(huge).all()


@pytest.mark.parametrize("length", [1, 64, 65, 128, 1000])
def test_a_base_that_grows_with_the_sample(length):
    growth = 3.0 * max(length, 64) / 64 - 2.0
    base = THETA * growth ** (DIM / (DIM - 2))
    expected = [base ** (-2 * pair / DIM) for pair in range(DIM // 2)]
    found, factor = made(rope._dynamic, length, factor=3.0)
    assert_close(found, expected)
    assert factor == 1.0
    if length <= 64:
        assert_close(found, PLAIN)


@pytest.mark.parametrize(("dim", "fits"), [(2, False), (4, True), (1, False)])
def test_one_pair_has_no_base_that_grows(dim, fits):
    parameters = RopeParameters(
        {"max_position_embeddings": 64}, {"rope_theta": 9.0, "factor": 2.0}, dim
    )
    if fits:
        rope._dynamic(parameters)
        return
    with pytest.raises(UnsupportedModelError, match="requires more than one pair"):
        rope._dynamic(parameters)


@pytest.mark.parametrize("original", [64, 32_768])
def test_long_waves_are_stretched(original):
    values = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": original}  # fmt: skip
    expected = []
    for angle in PLAIN:
        turns = original * angle / (2 * math.pi)
        share = min(max((turns - 1.0) / 3.0, 0.0), 1.0)
        expected.append((1 - share) * angle / 8 + share * angle)
    found, factor = made(rope._llama3, 1, 999, **values)
    assert_close(found, expected, expected)
    assert factor == 1.0
    for low in (4.0, 5.0):
        with pytest.raises(UnsupportedModelError, match="must be below its high_freq_factor"):
            made(rope._llama3, 1, **{**values, "low_freq_factor": low})


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("original", "fast", "slow"), [
    (64, 32.0, 1.0), (4096, 32.0, 1.0), (4096, 4.0, 0.5), (4096, 4.0, 4.0), (8, 1e9, 1.0),
])  # fmt: skip
def test_yarn(original, fast, slow, truncate):
    count = DIM // 2
    low, high = (
        count * math.log(original / (turns * 2 * math.pi)) / math.log(THETA)
        for turns in (fast, slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    high += 0.001 * (low == high)
    ramp = np.clip((np.arange(count) - low) / (high - low), 0, 1)
    found, factor = made(
        rope._yarn, 1, 999, factor=4.0, beta_fast=fast, beta_slow=slow, truncate=truncate,
        original_max_position_embeddings=original,
    )  # fmt: skip
    expected = PLAIN / 4 * ramp + PLAIN * (1 - ramp)
    assert_close(found, expected, expected)
    assert factor == pytest.approx(0.1 * math.log(4.0) + 1.0)


@pytest.mark.parametrize(("values", "factor"), [
    ({"factor": 4.0}, 0.1 * math.log(4.0) + 1), ({"factor": 1.0}, 1.0), ({"factor": 0.5}, 1.0),
    ({"factor": 4.0, "attention_factor": 0.5}, 0.5),
    ({"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.5},
     (0.07 * math.log(4.0) + 1) / (0.15 * math.log(4.0) + 1)),
    ({"factor": 4.0, "mscale": 0.7}, 0.1 * math.log(4.0) + 1),
    ({"factor": 4.0, "mscale_all_dim": 0.7}, 0.1 * math.log(4.0) + 1),
])  # fmt: skip
def test_the_factor_of_yarn(values, factor):
    assert made(rope._yarn, **values)[1] == pytest.approx(factor)


@pytest.mark.parametrize("theta", [1, 0.5])
def test_yarn_has_a_base_above_one(theta):
    with pytest.raises(UnsupportedModelError, match="requires a rope_theta above 1"):
        made(rope._yarn, factor=2.0, rope_theta=theta)


SHORT, LONG = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize(("config", "values", "factor"), [
    ({"max_position_embeddings": 256}, {}, math.sqrt(1 + math.log(4) / math.log(64))),
    ({"max_position_embeddings": 64}, {}, 1.0), ({"max_position_embeddings": 32}, {}, 1.0),
    ({}, {}, 1.0), ({}, {"factor": 2.0}, math.sqrt(1 + math.log(2) / math.log(64))),
    ({"max_position_embeddings": 256}, {"attention_factor": 1.5}, 1.5),
])  # fmt: skip
def test_longrope(config, values, factor):
    config = {**config, "original_max_position_embeddings": 64}
    lists = {"short_factor": SHORT, "long_factor": LONG}
    found, own = made(rope._longrope, 1, 64, 65, config=config, **lists, **values)
    assert_close(found, PLAIN / SHORT, PLAIN / SHORT, PLAIN / LONG)
    assert own == pytest.approx(factor)
    with pytest.raises(UnsupportedModelError, match=r"short_factor must have 4 numbers, .* got 3"):
        made(rope._longrope, config=config, **{**lists, "short_factor": SHORT[:3]})


@pytest.mark.parametrize(("length", "fits"), [
    (2, True), (1, False), (0, False), (-5, False), ("9", False), (None, False), (1.5, True),
])  # fmt: skip
def test_the_longest_text_is_a_number_above_one(length, fits):
    if fits:
        assert rope._above_zero(length) == float(length)
        return
    with pytest.raises(UnsupportedModelError, match="max_position_embeddings, a number above 1"):
        rope._above_zero(length)


def test_the_original_length_has_two_places():
    both = {"original_max_position_embeddings": 8}, {"original_max_position_embeddings": 16}
    assert RopeParameters(*both, DIM).original_length() == 8
    assert RopeParameters({}, both[1], DIM).original_length() == 16
    assert RopeParameters({"max_position_embeddings": 32}, {}, DIM).original_length() == 32
    parameters = RopeParameters({}, {"a": None, "b": 0, "c": 3}, DIM)
    assert [parameters.number(key, 7.0) for key in "abcd"] == [7.0, 7.0, 3.0, 7.0]


@pytest.mark.parametrize(("sections", "pairs", "interleaved", "axes"), [
    ([2, 1, 1], 4, False, (0, 0, 1, 2)), ([2, 1, 1], 5, False, None),
    ([0, 2, 1], 3, False, (1, 1, 2)),
    ([2, 1, 1], 4, True, (0, 1, 2, 0)), ([2, 2, 2], 8, True, (0, 1, 2, 0, 1, 2, 0, 0)),
    ([2, 1, 2], 8, True, (0, 1, 2, 0, 0, 2, 0, 0)), (None, 4, False, (0, 1, 1, 2)),
])  # fmt: skip
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_axis_of_each_pair(sections, pairs, interleaved, axes, key):
    config = {} if sections is None else {key: {"mrope_section": sections}}
    assert mrope_axes(config, [1, 2, 1], pairs, interleaved=interleaved) == axes


@pytest.mark.parametrize(("value", "number"), [
    (3, 3.0), (0.5, 0.5), ({"__float__": "Infinity"}, math.inf), (True, None), ("3", None),
    (None, None), ({"__float__": "NaN"}, None), ({}, None),
])  # fmt: skip
def test_numbers_of_a_config_s_limits(value, number):
    found = mamba._number(value)
    assert math.isnan(found) if number is None else found == number
