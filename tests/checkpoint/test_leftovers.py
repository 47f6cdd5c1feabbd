"""What a killed or failing writer leaves behind: it is never taken for whole, and goes."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from qlora_wgpu.checkpoint import append_line, recover, recover_all, remove
from qlora_wgpu.errors import CheckpointError


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def filled(path):
    path.mkdir()
    (path / "file").write_text("x")
    return path


def test_a_removed_folder_loses_its_name_before_its_files(tmp_path, monkeypatch):
    folder, seen = filled(tmp_path / "step-3"), []
    monkeypatch.setattr(shutil, "rmtree", lambda path: seen.append((path.name, folder.exists())))
    remove(folder)
    assert seen == [(".gone-step-3", False)]
    monkeypatch.undo()
    recover_all(tmp_path)
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_removed_is_a_sentence(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(CheckpointError, match="step-3 cannot be removed: Input/output error"):
        remove(filled(tmp_path / "step-3"))


def test_leftovers_go_and_what_was_moved_aside_comes_back(tmp_path):
    for name in ("one", ".old-one", ".tmp-one", ".old-two", ".tmp-two", ".gone-three"):
        filled(tmp_path / name)
    (tmp_path / ".tmp-four").write_text("x")
    (tmp_path / ".mine").write_text("x")
    recover(tmp_path / "one")
    assert ".old-two" in names(tmp_path) and ".old-one" not in names(tmp_path)
    recover_all(tmp_path)
    assert names(tmp_path) == [".mine", "one", "two"]
    recover_all(tmp_path / "missing")


def test_lines_are_appended_and_a_torn_one_is_dropped(tmp_path):
    path = tmp_path / "log"
    append_line(path, "one")
    append_line(path, "two")
    assert path.read_text() == "one\ntwo\n"
    path.write_text('one\n{"torn": ')
    append_line(path, "two")
    assert path.read_text() == "one\ntwo\n"
    path.write_text("torn")
    append_line(path, "one")
    assert path.read_text() == "one\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_line_that_does_not_fit_is_a_sentence(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written"):
        append_line("/dev/full", "one")
    reason = "Permission denied" if os.name == "nt" else "Is a directory"
    with pytest.raises(CheckpointError, match=f"cannot be written: {reason}"):
        append_line(tmp_path, "one")


def test_half_a_line_does_not_stay(tmp_path):
    """The disk is full within the line: what was written of it is taken back."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "log"
    append_line(path, "one")
    pid = os.fork()
    if pid == 0:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        try:
            append_line(path, "a line that is longer than ten bytes")
        except CheckpointError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert path.read_text() == "one\n"
