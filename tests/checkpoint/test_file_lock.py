"""A lock is one opener's at a time, and ends with its process."""

import errno
import subprocess
import sys

import pytest

from qlora_wgpu.checkpoint import FileLock

fcntl = pytest.importorskip("fcntl")

HOLDER = """
import sys, pathlib, time
from qlora_wgpu.checkpoint import FileLock
lock = FileLock(pathlib.Path(sys.argv[1]))
print(lock.acquire(), flush=True)
time.sleep(60)
"""


def test_one_has_it(tmp_path):
    first, second = FileLock(tmp_path / ".lock"), FileLock(tmp_path / ".lock")
    assert first.acquire() and first.is_exclusive and first.is_in_place
    assert not second.acquire() and not second.is_in_place
    first.release()
    assert second.acquire() and not first.is_in_place


@pytest.mark.slow
def test_it_ends_with_its_process(tmp_path):
    lock = FileLock(tmp_path / ".lock")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock.path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "True\n"
    assert not lock.acquire()
    process.kill()
    process.wait()
    process.stdout.close()
    assert lock.acquire()


def test_a_file_that_is_replaced_is_noticed(tmp_path):
    lock = FileLock(tmp_path / ".lock")
    assert lock.acquire()
    lock.path.unlink()
    assert not lock.is_in_place
    lock.path.touch()
    assert not lock.is_in_place


def test_a_lock_that_is_removed_leaves_nothing(tmp_path):
    lock, other = FileLock(tmp_path / ".lock"), FileLock(tmp_path / ".lock")
    assert lock.acquire()
    lock.remove()
    assert not lock.path.exists() and not lock.is_in_place
    lock.remove()
    assert other.acquire() and other.is_in_place


def test_a_file_that_was_removed_before_it_was_locked_is_no_lock(tmp_path, monkeypatch):
    """Whoever sweeps up may remove it between its making and its claim."""
    lock, flock = FileLock(tmp_path / ".lock"), fcntl.flock

    def swept(descriptor, how):
        lock.path.unlink(missing_ok=True)
        return flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", swept)
    assert not lock.acquire() and not lock.is_exclusive


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks(tmp_path, monkeypatch, number):
    def refuse(descriptor, how):
        raise OSError(number, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = FileLock(tmp_path / ".lock")
    assert lock.acquire() and lock.is_in_place and not lock.is_exclusive
