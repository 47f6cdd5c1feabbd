"""A pipe that nobody reads, as `| head -1` leaves it: commands end with their own exit code."""

import os
import subprocess
import sys

import pytest
from e2e.tiny import write_chats, write_model

INIT = ("init", "--model", "model", "--data", "chats.jsonl")


def into_closed(*arguments, cwd, both=False):
    """The exit code of a command, and what it says on stderr unless that is closed, too."""
    read, written = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "qlora_wgpu", *arguments],
            stdout=written, stderr=written if both else subprocess.PIPE, text=True, check=False,
            cwd=cwd, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    finally:
        os.close(written)
    return done.returncode, done.stderr or ""


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "model")
    write_chats(tmp_path / "chats.jsonl", 4)
    return tmp_path


@pytest.mark.cover(arguments=[("--help",), INIT])
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("train", "--help"), ("--version",), ("estimate", "model"), INIT],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_it_goes_on_to_its_own_end(folder, arguments):
    assert into_closed(*arguments, cwd=folder) == (0, "")
    assert (folder / "run.yaml").is_file() == (arguments is INIT)


@pytest.mark.full
def test_texts_that_nobody_reads_are_no_error(folder):
    assert into_closed(*INIT, cwd=folder) == (0, "")
    code, told = into_closed("data", "run.yaml", "--json", cwd=folder)
    assert code == 0 and "Traceback" not in told


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("estimate", "nowhere"), ("estimate", "--nothing")])
def test_an_error_that_nobody_reads_keeps_its_exit_code(folder, arguments):
    assert into_closed(*arguments, cwd=folder, both=True)[0] == 2
