"""The child process: its limits, its end, and what it may not do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import is_running, until

from qlora_wgpu.errors import DataError, TokenizerError
from qlora_wgpu.sandbox import expressions, process
from qlora_wgpu.sandbox.process import ChildProcess, Stopped
from qlora_wgpu.sandbox.templates import render

HANG = ("(a*)*!", "a" * 60)


@pytest.fixture
def child(monkeypatch):
    monkeypatch.setattr(process, "CHILD_SECONDS", 0.3)
    process_of_templates = ChildProcess("templates")
    yield process_of_templates
    process_of_templates.close()


@pytest.fixture
def matcher(monkeypatch):
    monkeypatch.setattr(process, "CHILD_SECONDS", 0.3)
    process_of_expressions = ChildProcess("expressions")
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
        rendered(child, "{{ 'x' * 10**9 }}")


def test_what_takes_too_long_is_stopped_and_the_next_call_is_answered(matcher) -> None:
    with pytest.raises(Stopped, match=r"takes more than 0\.3 seconds of computing"):
        matcher.call(expressions._fits, *HANG)
    assert matcher.call(expressions._fits, "a*", "aa") is True


def test_what_takes_long_all_together_is_stopped(matcher, monkeypatch) -> None:
    monkeypatch.setattr(process, "CHILD_SECONDS_REGAINED", 0.001)  # however fast the processor is
    slow = "(a*)*!", "a" * 21
    with pytest.raises(Stopped, match="seconds of computing"):
        for _ in range(200):
            matcher.call(expressions._fits, *slow)


def test_memory(child, monkeypatch) -> None:
    monkeypatch.setattr(process, "CHILD_SECONDS", 20.0)
    grow = "{% set n = namespace(l=[]) %}{% for i in range(99) %}"
    grow += "{% set n.l = n.l + ['x' * 9000000 ~ i] %}{% endfor %}"
    with pytest.raises(Stopped, match="512 MB of memory"):
        rendered(child, grow)


def test_a_process_that_was_killed_is_replaced(child) -> None:
    assert rendered(child, "a") == "a"
    os.kill(pid(child), signal.SIGKILL)
    os.waitid(os.P_PID, pid(child), os.WEXITED | os.WNOWAIT)  # has ended, which nobody has seen
    assert rendered(child, "b") == "b"


def test_an_interrupt_leaves_no_half_answer(child, monkeypatch) -> None:
    assert rendered(child, "a") == "a"
    with monkeypatch.context() as patch:
        patch.setattr(process, "_read", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rendered(child, "b")
    assert rendered(child, "c") == "c"


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
from qlora_wgpu.sandbox.process import ChildProcess
process.CHILD_SECONDS = 0.3
child = ChildProcess("expressions")
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
