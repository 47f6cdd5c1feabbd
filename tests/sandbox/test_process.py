"""The child process: its limits, its end, and what it may not do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.processes import is_running, until

from qlora_wgpu.errors import DataError, QLoRAError, TokenizerError
from qlora_wgpu.sandbox import expressions, process, tokenizers
from qlora_wgpu.sandbox.process import SandboxError, SandboxProcess
from qlora_wgpu.sandbox.templates import render

HANG = ("(a*)*!", "a" * 60)


@pytest.fixture
def child():
    process_of_templates = SandboxProcess("sandbox.templates")
    yield process_of_templates
    process_of_templates.close()


@pytest.fixture
def matcher(monkeypatch):
    monkeypatch.setattr(process, "CHILD_SECONDS", 0.3)
    process_of_expressions = SandboxProcess("sandbox.expressions")
    yield process_of_expressions
    process_of_expressions.close()


def rendered(child, source, **message):
    return child.call(render, source, {}, [message], None, False)[0]


def pid(child) -> int:
    return child._process.pid


def test_answers_and_errors_come_back(child) -> None:
    assert rendered(child, "{{ messages[0].content }}", content="ü\ud800") == "ü\ud800"
    with pytest.raises(DataError, match="refuses this conversation: no"):
        rendered(child, "{{ raise_exception('no') }}")
    with pytest.raises(TokenizerError, match="stopped"):
        rendered(child, "{{ messages.append(1) }}")
    with pytest.raises(SandboxError, match="needs more than 512 MB of memory"):
        rendered(child, "{{ 'x' * 10**9 }}")


@pytest.mark.slow
def test_what_takes_too_long_is_stopped_and_the_next_call_is_answered(matcher) -> None:
    with pytest.raises(SandboxError, match=r"takes more than 0\.3 seconds of CPU time"):
        matcher.call(expressions._fits, *HANG)
    assert matcher.call(expressions._fits, "a*", "aa") is True


@pytest.mark.slow
def test_what_takes_long_all_together_is_stopped(matcher, monkeypatch) -> None:
    for name in ("CHILD_SECONDS_REGAINED", "CHILD_SECONDS_PER_BYTE"):
        monkeypatch.setattr(process, name, 0.0)  # it ends however fast the processor is
    answers = 0
    with pytest.raises(
        SandboxError, match=r"takes more than 0\.3 seconds of CPU time for"
    ) as stopped:
        while True:
            matcher.call(expressions._fits, "(a*)*!", "a" * 15)
            answers += 1
    assert answers > 1 and f"for {answers + 1} items" in str(stopped.value)


@pytest.mark.slow
def test_short_calls_count_as_well(matcher, monkeypatch) -> None:
    monkeypatch.setattr(process, "CHILD_SECONDS", 20.0)
    matcher.call(expressions._fits, "a*b*", "a")
    used = psutil.Process(pid(matcher)).cpu_times
    begin = used().user + used().system
    while (taken := used().user + used().system - begin) < 0.3:
        matcher.call(expressions._fits, "a*b*", "a" * 100)
    assert matcher._spent > 0.8 * taken


def test_an_answer_that_comes_too_late_is_none(matcher, monkeypatch) -> None:
    """The timer counts whole ticks of the system's: an answer may come when none is left."""
    read = process._read
    with monkeypatch.context() as patch:
        patch.setattr(process, "_read", lambda of: (read(of)[0], 0.31))
        with pytest.raises(SandboxError, match=r"takes more than 0\.3 seconds of CPU time$"):
            matcher.call(expressions._fits, "a*", "aa")
    assert matcher.call(expressions._fits, "a*", "aa") is True


@pytest.mark.slow
def test_what_waits_without_computing_is_stopped(matcher, monkeypatch) -> None:
    monkeypatch.setattr(process, "CHILD_WAIT", 1.0)
    with pytest.raises(SandboxError, match="does not respond within 1 seconds"):
        matcher.call(time.sleep, 600)


def test_a_process_that_cannot_start_says_why() -> None:
    with pytest.raises(QLoRAError, match=r"for nothing: ModuleNotFoundError"):
        SandboxProcess("sandbox.nothing").call(expressions._fits, "a", "a")


@pytest.mark.slow
def test_one_whose_setup_fails_is_set_up_again() -> None:
    broken = SandboxProcess("sandbox.tokenizers", (tokenizers._load, b"{"))
    for _ in range(2):
        with pytest.raises(TokenizerError, match="refuses it"):
            broken.call(tokenizers._ask, "get_vocab_size")


@pytest.mark.slow
def test_memory(child, monkeypatch) -> None:
    monkeypatch.setattr(process, "CHILD_SECONDS", 20.0)
    grow = "{% set n = namespace(l=[]) %}{% for i in range(99) %}"
    grow += "{% set n.l = n.l + ['x' * 9000000 ~ i] %}{% endfor %}"
    with pytest.raises(SandboxError, match="512 MB of memory"):
        rendered(child, grow)


@pytest.mark.slow
def test_memory_is_watched_where_the_system_does_not_limit_it(child, monkeypatch) -> None:
    monkeypatch.setattr(process, "_LIMITED", False)
    assert rendered(child, "a") == "a"
    monkeypatch.setattr(process, "CHILD_BYTES", 100 << 20)
    with pytest.raises(SandboxError, match="needs more than 100 MB of memory"):
        rendered(child, "{% set a = 'x' * 10**8 * 2 %}{{ 7 ** 7 ** 9 }}")
    assert rendered(child, "b") == "b"


@pytest.mark.slow
def test_a_process_that_was_killed_is_replaced(child) -> None:
    assert rendered(child, "a") == "a"
    os.kill(pid(child), signal.SIGKILL)
    os.waitid(os.P_PID, pid(child), os.WEXITED | os.WNOWAIT)  # has ended, which nobody has seen
    assert rendered(child, "b") == "b"


@pytest.mark.slow
def test_an_interrupt_leaves_no_half_answer(child, monkeypatch) -> None:
    assert rendered(child, "a") == "a"
    with monkeypatch.context() as patch:
        patch.setattr(process, "_read", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rendered(child, "b")
    assert rendered(child, "c") == "c"


@pytest.mark.slow
def test_it_is_its_parents_alone(child) -> None:
    """A process that forked starts a child of its own."""
    assert rendered(child, "a") == "a"
    first = pid(child)
    child._owner = first  # as it looks to another process
    assert rendered(child, "b") == "b" and pid(child) != first
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)


def test_no_file_can_be_opened_and_no_secret_is_inherited(child, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert rendered(child, "a") == "a"
    of = Path(f"/proc/{pid(child)}")
    if not of.is_dir():
        pytest.skip("needs /proc")
    assert "secret" not in (of / "environ").read_text()
    limits = (of / "limits").read_text()
    assert "Max open files            0 " in limits and "Max file size             0 " in limits


def test_no_orphan_is_left_by_a_parent_that_is_killed() -> None:
    code = f"""
from qlora_wgpu.sandbox import expressions, process
from qlora_wgpu.sandbox.process import SandboxProcess
process.CHILD_SECONDS = 0.3
child = SandboxProcess("sandbox.expressions")
child.call(expressions._fits, "a", "a")
print(child._process.pid, flush=True)
child.call(expressions._fits, *{HANG!r})
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    orphan = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not is_running(orphan))
