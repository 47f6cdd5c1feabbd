"""What a run's losses tell at its end."""

import math

import pytest

from qlora_wgpu.training.step_log import Divergence

GUESS = math.log(2048)


def ended(losses):
    watch = Divergence(GUESS)
    reasons = [watch.diverged(loss) for loss in losses]
    assert not any(reasons)
    assert watch.ended() is None
    return watch.without_progress()


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([4.0, 9.0, *[GUESS - 0.01, GUESS + 0.02] * 7], "a uniform guess"),
        ([7.95] * 3 + [GUESS] * 17, "a uniform guess"),  # a base that was worse
        ([3.0] * 6 + [3.4] * 12, "3.40, are above its first ones, 3.00"),
        ([3.0, 2.9, 3.2] * 5, None),
        ([3.0] * 5 + [2.0] * 15, None),
        ([GUESS] * 8, None),  # too few to tell
        ([8.0, 7.9, 7.8] + [7.7 - i / 10 for i in range(12)], None),  # passes the guess
    ],
)
def test_a_run_in_vain_is_told(losses, words):
    verdict = ended(losses)
    assert verdict is None if words is None else words in verdict


FAR, STILL = "the loss is far above the first ones", "the gradient is zero"


def told(steps, uniform=math.inf):
    """What ten steps in a row say after each step, and what the end says."""
    watch = Divergence(uniform)
    return [watch.diverged(*step) for step in steps], watch


@pytest.mark.parametrize(
    ("steps", "last"),
    [
        ([(1.0,)] * 5 + [(2.51,)] * 10, FAR),
        ([(1.0,)] * 5 + [(2.5,)] * 10, None),  # no more than 1.5 above
        ([(1.0,)] * 5 + [(2.51,)] * 9, None),
        ([(1.0, 0.0)] * 10, STILL),
        ([(1.0, 0.0)] * 9, None),
        ([(0.01, 0.0)] * 10, None),  # it is solved
        ([(0.011, 0.0)] * 10, STILL),
        ([(1.0, 1e-9)] * 10, None),
        ([(1.0, 0.0)] * 9 + [(1.0, 1.0)], None),
    ],
)
def test_ten_steps_that_are_far_worse_are_a_divergence(steps, last):
    said, watch = told(steps)
    assert not any(said[:9]) and said[-1] == last
    assert watch.diverged(1.0) is None


@pytest.mark.parametrize(
    ("first", "then", "last"),
    [
        (1.0, GUESS + 1.51, FAR),
        (GUESS, GUESS + 1.51, FAR),
        (GUESS, GUESS + 1.49, None),
        (GUESS - 1, GUESS + 1.4, None),
        (GUESS + 1, GUESS + 2.51, FAR),
        (GUESS + 1, GUESS + 2.49, None),
    ],
)
def test_a_model_that_is_worse_than_its_first_step_and_a_guess_has_diverged(first, then, last):
    """Even within the first five steps, whose mean would hide it."""
    said, watch = told([(first,), *[(then,)] * 9], GUESS)
    assert said[-1] is None and watch.diverged(then) == last


@pytest.mark.parametrize(
    ("steps", "ends"),
    [
        ([(1.0, 1.0), (1.0, 0.0), (1.0, 0.0)], STILL),
        ([(1.0, 1.0)] * 12 + [(1.0, 0.0)] * 2, STILL),
        ([(1.0, 1.0), (1.0, 1.0), (1.0, 0.0)], None),
        ([(1.0,), (1.0,), (1.0,), (9.0,), (9.0,), (9.0,)], FAR),  # half of them
        ([(1.0,), (1.0,), (1.0,), (1.0,), (9.0,), (9.0,)], None),
        ([(1.0,), (1.0,), (9.0,), (9.0,), (9.0,)], FAR),
        ([(1.0,), (9.0,)], None),  # one step tells nothing
        ([(1.0,)] * 11 + [(9.0,)] * 9, None),
    ],
)
def test_an_end_tells_of_a_short_run(steps, ends):
    assert told(steps, 2.0)[1].ended() == ends


def test_bounds_of_a_run_in_vain():
    assert ended([GUESS] * 15) and ended([GUESS] * 14) is None
    assert ended([GUESS - 0.09] * 15) and ended([GUESS - 0.11] * 15) is None
    assert ended([2.0] * 5 + [2.31] * 10) and ended([2.0] * 5 + [2.29] * 10) is None
    assert ended([2.0] * 5 + [9.0] * 3 + [2.2] * 10) is None
