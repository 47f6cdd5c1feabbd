"""Output on a disk that is full: what could not be written is said, and the exit code is 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.tiny import write_chats, write_model

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")

NO_ROOM = "the standard output: No space left on device"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full")
    write_model(folder / "model")
    write_chats(folder / "chats.jsonl", 4)
    (folder / "run.yaml").write_text("{model: {path: model}, data: {train: chats.jsonl}}")
    return folder


def run(*arguments, cwd, **streams):
    """A command, its streams buffered as a user's are."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONUNBUFFERED", None)
    return subprocess.run(
        [sys.executable, "-m", "qlora_wgpu", *arguments],
        text=True, check=False, cwd=cwd, env=environment, **streams,
    )  # fmt: skip


@pytest.mark.cover(arguments=[("--help",), ("data", "run.yaml", "--json")])
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), ("train", "--help"), ("estimate", "model"), ("data", "run.yaml"),
     ("data", "run.yaml", "--json")],
    ids=" ".join,
)  # fmt: skip
def test_stdout_that_is_full(folder, arguments):
    with FULL.open("w") as full:
        done = run(*arguments, cwd=folder, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said.endswith(NO_ROOM)
    assert "Exception" not in done.stderr


@pytest.mark.cover(arguments=[("train", "nosuch.yaml"), ("nosuch",)])
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("train", "nosuch.yaml"), ("train",), ("nosuch",), ("estimate", "model", "--nothing")],
    ids=" ".join,
)
def test_stderr_that_is_full_leaves_the_exit_code(folder, arguments):
    with FULL.open("w") as full:
        both = run(*arguments, cwd=folder, stdout=full, stderr=full)
        one = run(*arguments, cwd=folder, stdout=subprocess.PIPE, stderr=full)
    assert (both.returncode, one.returncode, one.stdout) == (2, 2, "")


@pytest.mark.slow
def test_a_command_does_not_hang_on_what_stderr_takes(folder):
    with FULL.open("w") as full:
        done = run("estimate", "model", cwd=folder, stdout=subprocess.PIPE, stderr=full)
    assert done.returncode == 0 and "model" in done.stdout
