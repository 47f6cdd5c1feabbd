"""Folders that every command needs: where one is missing, a sentence says so."""

import os
import subprocess
import sys

import pytest

NO_FOLDER_FOR_FILES = """\
import sys, tempfile
tempfile._candidate_tempdir_list = lambda: ["/nowhere"]
from qlora_wgpu.supervision.parent import supervise
sys.exit(supervise(["train", "run.yaml"]))
"""


def told(*command, cwd):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


@pytest.mark.skipif(os.name != "posix", reason="others keep a folder that a process is in")
@pytest.mark.parametrize("arguments", [("train", "run.yaml"), ("estimate", "model")])
def test_a_working_directory_that_was_removed(tmp_path, arguments):
    (tmp_path / "gone").mkdir()
    script = 'cd gone && rmdir ../gone && exec "$@"'
    command = ("sh", "-c", script, "sh", sys.executable, "-m", "qlora_wgpu", *arguments)
    assert told(*command, cwd=tmp_path) == (
        "error: the working directory cannot be used (No such file or directory): change to "
        "another\n"
    )


def test_nowhere_for_temporary_files(tmp_path):
    assert told(sys.executable, "-c", NO_FOLDER_FOR_FILES, cwd=tmp_path) == (
        "error: no folder for temporary files is writable: set TMPDIR to one that is\n"
    )
