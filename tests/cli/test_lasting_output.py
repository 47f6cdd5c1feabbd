"""Output that fails does not end a run: a full disk, a pipe that was closed."""

import errno
import io
import os
import subprocess
import sys

import pytest

from qlora_wgpu.cli._display import TrainingDisplay
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.errors import QLoRAError

SHOWS = """
import sys
from qlora_wgpu.cli._terminal import Terminal
console = Terminal(lasting=True)
for number in range(3):
    console.print("x" * 70000, highlight=False)
    sys.stdin.readline()
sys.stderr.write("done")
"""


class Full(io.StringIO):
    """A disk that is full after some characters."""

    room = 40

    def write(self, text):
        if self.tell() + len(text) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_a_display_outlives_a_full_disk(monkeypatch):
    full, told = Full(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", full)
    monkeypatch.setattr(sys, "stderr", told)
    with TrainingDisplay(Terminal(lasting=True)) as display:
        for text in ("one", "two", "a" * 50, "b"):
            display.note(text)
        display.activity("reading")
    assert full.getvalue() == "note: one\nnote: two\n"
    assert told.getvalue() == (
        "warning: nothing more can be shown (No space left on device): the run goes on\n"
    )


def test_elsewhere_a_full_disk_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(QLoRAError, match="No space left"):
        Terminal().print("a" * 50)


def test_a_program_without_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    Terminal(lasting=True).print("nothing")


def test_a_closed_pipe_ends_nothing():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", SHOWS], text=True, **pipes)
    process.stdout.read(10)
    process.stdout.close()
    process.stdin.write("\n" * 3)
    process.stdin.close()
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    assert told == "warning: nothing more can be shown (Broken pipe): the run goes on\ndone"


def test_a_closed_pipe_of_both_streams_leaves_the_exit_code():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    as_in_runs = 'import os, sys\nsys.stderr = os.fdopen(os.dup(2), "w", buffering=1)\n'
    program = as_in_runs + SHOWS.replace('sys.stderr.write("done")', "")
    process = subprocess.Popen([sys.executable, "-c", program], text=True, **pipes)
    process.stdout.read(10)
    process.stdout.close()
    process.communicate("\n" * 3)
    assert process.returncode == 0
