"""What is read of a process with a reward function, and shown, without starting one."""

import os
import queue
from pathlib import Path
from types import SimpleNamespace

import pytest

from qlora_wgpu.errors import RewardError
from qlora_wgpu.grpo import reward_process
from qlora_wgpu.grpo.reward_failures import RewardTimeoutError
from qlora_wgpu.grpo.reward_process import RewardProcess, _as_json, _imported, _write


class Process:
    """A process that has ended, or runs on; ``ends_late`` if it does so only when it is killed."""

    def __init__(self, code=None, ends_late=False):
        self.code, self.ends_late, self.closed = code, ends_late, 0

    def poll(self):
        return self.code

    def wait(self, seconds=None):
        if self.ends_late:
            raise reward_process.subprocess.TimeoutExpired("python", seconds)
        return self.code


@pytest.fixture
def opened(monkeypatch):
    monkeypatch.setattr(reward_process, "_POLL", 0.001)

    def open_(*lines, process=None, number=2):
        made = RewardProcess.__new__(RewardProcess)
        made.where, made._number, made._lines = "a.py:f", number, queue.Queue()
        made._process, made._printed = process or Process(), 0
        made.close = lambda: setattr(made._process, "closed", made._process.closed + 1)
        for line in lines:
            made._lines.put(line)
        return made

    return open_


def test_the_answer_to_the_latest_request_counts(opened):
    process = opened(b'{"number": 1, "rewards": [0]}\n', b'{"number": 2, "rewards": [1]}\n')
    assert process._answer(9.0) == {"number": 2, "rewards": [1]}
    assert opened(b'{"number": 2, "error": "x"}\n')._answer(9.0)["error"] == "x"


@pytest.mark.parametrize(
    "line",
    [b"[]\n", b"3\n", b"no json\n", b'{"number": 2}\n', b'{"number": 2, "rewards": 3}\n',
     b'{"rewards": []}\n', b"[" * 100_000],
)  # fmt: skip
def test_lines_of_the_function_s_own_end_its_process(opened, line):
    process = opened(line)
    message = "it has written to the pipe that its rewards are read from"
    assert process._answer(9.0) == {"error": message}
    assert process._process.closed == 1


@pytest.mark.cover("all")
@pytest.mark.parametrize("lines", [(b"",), ()])
@pytest.mark.parametrize(
    ("process", "expected"),
    [(Process(3), "its process ended with exit code 3"), (Process(-9), "SIGKILL")],
)
def test_a_process_that_has_ended_says_how(opened, lines, process, expected):
    answer = opened(*lines, process=process)._answer(9.0)
    assert expected in answer["error"] and not process.closed


def test_a_process_that_has_closed_its_pipe_is_ended(opened):
    process = opened(b"", process=Process(ends_late=True))
    assert process._answer(9.0) == {
        "error": "it has closed the pipe that its rewards are read from"
    }
    assert process._process.closed == 1


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_a_batch_that_takes_too_long_ends_its_process(opened, seconds):
    process = opened()
    with pytest.raises(RewardTimeoutError, match=f"a.py:f: no rewards within {seconds:g} s"):
        process._answer(seconds)
    assert process._process.closed == 1


def test_it_is_waited_for_in_turns_until_the_time_is_over(opened, monkeypatch):
    """No turn is longer than what is left, nor than the time after which an end is noticed."""
    process, asked, times = opened(), [], iter([0.0, 0.0, 2.5, 3.0, 3.2])
    monkeypatch.setattr(reward_process.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(reward_process, "_POLL", 1.0)

    def get(timeout):
        asked.append(round(timeout, 6))
        raise queue.Empty

    process._lines = SimpleNamespace(get=get)
    with pytest.raises(RewardTimeoutError):
        process._answer(3.0)
    assert asked == [1.0, 0.5, 0.0]


def test_a_call_starts_what_has_ended_and_sends_a_number(opened, monkeypatch):
    sent, process = [], opened(process=Process(1))
    monkeypatch.setattr(reward_process, "_write", lambda stream, data: sent.append(data))

    def thread(target, args, daemon):
        assert daemon  # it may wait for a process that does not read
        return SimpleNamespace(start=lambda: target(*args))

    monkeypatch.setattr(reward_process, "threading", SimpleNamespace(Thread=thread))

    def start():
        process._process, process._number = SimpleNamespace(stdin=None, poll=lambda: None), 0

    process._start, process._timeout = start, 7.0
    process._answer = lambda seconds: {"rewards": [seconds]}
    assert process(completions=["a"], odd={1}) == [7.0]
    assert process(completions=["b"]) == [7.0]
    process._answer = lambda seconds: {"error": "no"}
    with pytest.raises(RewardError, match=r"^reward function a\.py:f: no$"):
        process(completions=[])
    assert sent == [
        b'{"number": 1, "batch": {"completions": ["a"], "odd": "{1}"}}\n',
        b'{"number": 2, "batch": {"completions": ["b"]}}\n',
        b'{"number": 3, "batch": {"completions": []}}\n',
    ]


@pytest.mark.parametrize(
    ("sizes", "shown"), [((3, 4), 7), ((4, 6), 10), ((4, 7), 10), ((12, 5), 10), ((10, 1, 1), 10)]
)
def test_what_a_function_prints_is_shown_up_to_a_limit_that_is_told_once(
    opened, monkeypatch, sizes, shown
):
    monkeypatch.setattr(reward_process, "_MOST_SHOWN", 10)
    written, chunks = [], iter([*(b"x" * size for size in sizes), b""])
    monkeypatch.setattr(
        reward_process, "os",
        SimpleNamespace(read=lambda *_: next(chunks), write=lambda _, data: written.append(data)),
    )  # fmt: skip
    with Path(os.devnull).open("rb") as stream:
        opened()._show(SimpleNamespace(stderr=stream), None)
    text = b"".join(written)
    told = b"\na.py:f has printed more than 1 MiB: the rest is not shown\n"
    assert text.count(b"x") - told.count(b"x") * text.count(told) == shown
    assert text.count(told) == (shown == 10)


def test_lines_are_read_until_the_pipe_ends(monkeypatch):
    monkeypatch.setattr(reward_process, "_MOST_ANSWERED", 4)
    lines, (read, write) = queue.Queue(), os.pipe()
    with os.fdopen(write, "wb") as stream:
        _write(stream, b"ab\ncdefgh\n")
    RewardProcess._read(SimpleNamespace(stdout=os.fdopen(read, "rb")), lines)
    assert [lines.get_nowait() for _ in range(lines.qsize())] == [b"ab\n", b"cdef", b"gh\n", b""]


def test_rewards_of_any_kind_are_sent():
    for given, expected in (
        (None, None), (0.5, 0.5), (2, 2.0), (True, 1.0), ("x" * 101, "x" * 100),
        (10**400, float("inf")), (1j, "1j"), ([1], "[1]"), ([0] * 99, repr([0] * 99)[:100]),
    ):  # fmt: skip
        made = _as_json(given)
        assert made == expected and type(made) is type(expected)


def test_a_file_imports_what_is_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(reward_process.sys, "path", [*reward_process.sys.path])
    (tmp_path / "beside_rewards.py").write_text("VALUE = 3\n")
    (tmp_path / "own.py").write_text("import beside_rewards\nf = beside_rewards.VALUE\n")
    assert _imported(str(tmp_path / "own.py")).f == 3
