"""How far a result may be from its reference, without a device."""

import numpy as np
import pytest

from qlora_wgpu.selfcheck.runner import ROUNDING, SUMS, Runner


@pytest.fixture
def run():
    made = Runner.__new__(Runner)
    made.worst = made.excess = 0.0
    return made


EXACT = np.array([[4.0, -2.0], [1.0, 0.0]])
APART = np.array([[0.0, 1.0], [0.0, 0.0]])


def test_what_is_exact_has_no_error(run):
    run.compare(EXACT, EXACT)
    run.compare_exactly(EXACT, EXACT.copy())
    run.compare(np.zeros((0, 3)), np.zeros((0, 3)))
    assert (run.worst, run.excess) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("inner", [0.0, 0.25, np.full((2, 2), 0.5)])
@pytest.mark.cover("all")
def test_an_error_is_measured_by_the_largest_value(run, dtype, by_row, inner):
    got = EXACT.copy()
    got[1, 0] += 0.5
    run.compare(got, EXACT, dtype, inner=inner, by_row=by_row)
    scale = 1.0 if by_row else 4.0
    assert run.worst == 0.5 / scale
    room = (inner * scale if isinstance(inner, float) else 0.5) + ROUNDING[dtype] * 1.0
    assert run.excess == pytest.approx(0.5 / (room + SUMS * scale))


def test_the_worst_of_several_results_counts(run):
    run.compare(EXACT + 0.5 * APART, EXACT, inner=0.5)
    worst, excess = run.worst, run.excess
    run.compare(EXACT + 0.25 * APART, EXACT, inner=0.5)
    assert (run.worst, run.excess) == (worst, excess)
    run.compare(EXACT + 1.0 * APART, EXACT, inner=0.5)
    assert run.worst == 2 * worst and run.excess > excess


@pytest.mark.parametrize(("signs", "is_biased"), [(1.0, True), (-1.0, True), (0.0, False)])
def test_errors_that_all_go_outwards_are_more_than_rounding(run, signs, is_biased):
    """Each is within its tolerance, and so is their sum if they go both ways."""
    exact = np.where(np.arange(400) % 3 == 0, -1.0, 1.0)
    ways = np.where(np.arange(400) % 2 == 0, 1.0, -1.0) if signs == 0.0 else signs * np.sign(exact)
    run.compare(exact + 0.375 * ways, exact, inner=0.5)
    assert (run.excess > 1) == is_biased
    if is_biased:
        roundings = 0.5 + ROUNDING["float32"]
        assert run.excess == pytest.approx(0.375 * 400 / (4 * roundings * 20 + 400 * SUMS))


@pytest.mark.parametrize("got", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_infinitely_far(run, got):
    run.compare(np.array([got, 1.0]), np.array([1.0, 1.0]))
    assert run.worst == run.excess == np.inf


@pytest.mark.parametrize("expected", [np.nan, np.inf])
def test_a_reference_must_be_numbers(run, expected):
    run.compare(np.array([expected, 1.0]), np.array([expected, 1.0]))
    assert run.worst == run.excess == np.inf


def test_numbers_one_by_one_have_errors_of_their_own(run):
    run.compare_each([100.0, 1.25], [100.0, 1.0])
    assert run.worst == 0.25


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [([1.0, np.nan], [1.0, np.nan], True), ([1.0, 2.0], [1.0, 2.5], False),
     ([np.nan], [1.0], False), ([1.0], [np.nan], False)],
)  # fmt: skip
def test_bits_are_the_same_or_not(run, got, expected, same):
    run.compare_exactly(np.array(got), np.array(expected))
    assert (run.worst, run.excess) == ((0.0, 0.0) if same else (np.inf, np.inf))
