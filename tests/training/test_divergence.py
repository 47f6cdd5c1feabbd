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
