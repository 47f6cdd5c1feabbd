"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from qlora_wgpu.checkpoint import append_line, atomic, atomic_folder, write_file, write_safetensors
from qlora_wgpu.errors import CheckpointError


def test_writes_and_replaces_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, b"one")
    assert path.read_bytes() == b"one"
    write_file(str(path), b"")
    assert path.read_bytes() == b""
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    old = os.umask(umask)
    try:
        write_file(tmp_path / "file", b"x")
        write_safetensors(tmp_path / "tensors", {"x": np.ones(1)})
        with atomic_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(old)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode
    assert (tmp_path / "tensors").stat().st_mode & 0o777 == mode
    assert (tmp_path / "folder").stat().st_mode & 0o777 == mode | mode >> 2 & 0o111


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_file(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError) as caught:
        write_file(path, b"new")
    assert str(caught.value) == f"{path} cannot be written: No space left on device"
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".tmp-file").write_bytes(b"half")
    write_file(tmp_path / "file", b"whole")
    (tmp_path / ".tmp-folder").mkdir()
    (tmp_path / ".tmp-folder" / "stale").write_bytes(b"half")
    with atomic_folder(tmp_path / "folder") as unfinished:
        (unfinished / "new").write_bytes(b"x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["new"]


@pytest.mark.parametrize("place", ["missing/file", "taken", "file/below"])
def test_places_where_nothing_can_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="cannot be written: "):
        write_file(tmp_path / place, b"x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]


def test_a_folder_appears_only_when_it_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with atomic_folder(path) as unfinished:
        assert unfinished.parent == path.parent
        (unfinished / "deep").mkdir()
        (unfinished / "deep" / "file").write_bytes(b"x")
        assert not path.exists()
    assert (path / "deep" / "file").read_bytes() == b"x"
    assert [p.name for p in path.parent.iterdir()] == ["b"]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for name in ("one", "two"):
        with atomic_folder(path) as unfinished:
            (unfinished / name).write_bytes(b"x")
    assert [p.name for p in path.iterdir()] == ["two"]
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_unfinished_folder_leaves_what_was_there(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "folder"
    with atomic_folder(path) as unfinished:
        (unfinished / "old").write_bytes(b"x")
    with pytest.raises(error), atomic_folder(path) as unfinished:
        (unfinished / "new").write_bytes(b"x")
        raise error
    assert [p.name for p in path.iterdir()] == ["old"]
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_folder_moved_aside_by_a_killed_process_comes_back(tmp_path: Path) -> None:
    (tmp_path / ".old-folder").mkdir()
    (tmp_path / ".old-folder" / "precious").write_bytes(b"x")
    with pytest.raises(ValueError), atomic_folder(tmp_path / "folder"):
        raise ValueError
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["precious"]


def test_an_error_of_the_system_inside_a_folder_is_one_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="folder cannot be written: No such file"),
        atomic_folder(tmp_path / "folder") as unfinished,
    ):
        (unfinished / "missing" / "file").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="taken cannot be written: it is a file"):
        (tmp_path / "taken").write_bytes(b"x")
        with atomic_folder(tmp_path / "taken"):
            pass


def test_everything_is_flushed_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("the names of open files cannot be seen here")
    monkeypatch.setattr(os, "fsync", note)
    write_file(tmp_path / "file", b"x")
    assert flushed == [".tmp-file", tmp_path.name]
    flushed.clear()
    with atomic_folder(tmp_path / "folder") as unfinished:
        (unfinished / "deep").mkdir()
        (unfinished / "deep" / "a").write_bytes(b"x")
        (unfinished / "b").write_bytes(b"x")
    assert sorted(flushed[:-1]) == [".tmp-folder", "a", "b", "deep"]
    assert flushed[-1] == tmp_path.name


@pytest.mark.parametrize(("refusals", "written"), [(2, True), (3, False)])
def test_a_file_that_is_open_is_waited_for(tmp_path, monkeypatch, refusals, written) -> None:
    replace, left = Path.replace, [refusals]

    def refuse(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] >= 0:
            raise PermissionError(errno.EACCES, "Access is denied")
        return replace(path, target)

    monkeypatch.setattr(atomic, "_PAUSES", (0.001, 0.001))
    monkeypatch.setattr(Path, "replace", refuse)
    if written:
        write_file(tmp_path / "file", b"x")
        assert (tmp_path / "file").read_bytes() == b"x"
    else:
        with pytest.raises(CheckpointError, match="file cannot be written: Access is denied"):
            write_file(tmp_path / "file", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] * written


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    arrays = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
        "y": np.zeros((0, 3), np.float16),
        "z": np.array(3, np.int64),
    }
    write_safetensors(tmp_path / "file", arrays)
    tensors = safetensors.numpy.load_file(tmp_path / "file")
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tensors[name].dtype == array.dtype
        assert tensors[name].shape == array.shape
        assert tensors[name].tobytes() == np.ascontiguousarray(array).tobytes()


def test_safetensors_says_pt_unless_told_otherwise(tmp_path: Path) -> None:
    def metadata() -> dict[str, str]:
        with safetensors.safe_open(tmp_path / "file", "np") as file:
            return dict(file.metadata() or {})

    write_safetensors(tmp_path / "file", {"x": np.ones(1)})
    assert metadata() == {"format": "pt"}
    write_safetensors(tmp_path / "file", {"x": np.ones(1)}, {"a": "b"})
    assert metadata() == {"a": "b"}


WRITER = """
import sys, itertools, pathlib
from qlora_wgpu.checkpoint.atomic import atomic_folder, write_file
path = pathlib.Path(sys.argv[1])
for i in itertools.count():
    content = str(i).encode() * 20000
    write_file(path / "file", content)
    with atomic_folder(path / f"step-{i % 3}") as unfinished:
        (unfinished / "a").write_bytes(content)
        (unfinished / "b").write_bytes(content)
    if i == 3:
        print("ready", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_killed_writer_leaves_only_whole_files_and_folders(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.05 * rng.random())
        process.kill()
        process.wait()
        process.stdout.close()
        paths = [p for p in tmp_path.iterdir() if not p.name.startswith(".")]
        assert paths
        for path in paths:
            files = [path / "a", path / "b"] if path.is_dir() else [path]
            contents = {file.read_bytes() for file in files}
            assert len(contents) == 1
            content = contents.pop()
            number = content[: len(content) // 20000]
            assert content == number * 20000


def test_a_line_is_written_in_as_many_parts_as_it_takes(tmp_path, monkeypatch):
    path = tmp_path / "log"
    open_file = Path.open

    class Short:
        """Takes half of what it is given, as a write may."""

        def __init__(self, file):
            self._file = file

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            self._file.close()

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, data):
            return self._file.write(data[: max(1, len(data) // 2)])

    monkeypatch.setattr(Path, "open", lambda *args, **options: Short(open_file(*args, **options)))
    append_line(path, "one row")
    append_line(path, "another")
    assert path.read_bytes() == b"one row\nanother\n"


def test_a_line_that_is_there_is_not_written_again(tmp_path):
    path = tmp_path / "log"
    for line in ("a", "ba", "ba", "a", "a", ""):
        append_line(path, line)
    assert path.read_bytes() == b"a\nba\na\n\n"
