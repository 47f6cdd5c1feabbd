"""Reward functions of Python have a time limit."""

import signal
import threading
import time

import pytest

from qlora_wgpu.errors import RewardError
from qlora_wgpu.grpo.reward_failures import limited
from qlora_wgpu.grpo.rewards import rewards_of

BATCH = {"prompts": ["p"], "completions": ["a"], "completion_ids": [[1]]}


def loops(**_):
    while True:
        try:
            sum(range(1000))
        except Exception:  # as of a server that does not respond
            continue


def sleeps(**_):
    time.sleep(30)


def interrupted(function):
    """The message, and how long it takes."""
    begin = time.monotonic()
    with pytest.raises(RewardError) as caught:
        rewards_of({"mine": limited(function, "mine", 0.1)}, BATCH)
    return str(caught.value), time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("function", [loops, sleeps])
def test_a_function_is_interrupted(function):
    before = signal.getsignal(signal.SIGUSR2)
    message, seconds = interrupted(function)
    assert message == "reward function mine: no rewards within 0.1 s" and seconds < 5
    assert signal.getsignal(signal.SIGUSR2) is before


def test_in_another_thread_python_code_is_interrupted():
    found = []
    thread = threading.Thread(target=lambda: found.append(interrupted(loops)))
    thread.start()
    thread.join(20)
    assert found[0][0].endswith("no rewards within 0.1 s")


def test_a_function_in_time_is_not_interrupted():
    assert limited(lambda **_: (1.0,), "mine", 0.05)(**BATCH) == [1.0]
    time.sleep(0.1)
