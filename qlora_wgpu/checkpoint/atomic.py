"""Atomic writes of files and folders, and locks that end with their process.

Everything is written under a temporary name in the same folder, flushed to disk, and renamed; then
the folder is flushed, so that the rename is durable. A folder is renamed before it is removed, so
nobody sees a part of it. A killed process may leave three names behind, which the next writer of
that name, or ``recover``, cleans up:

- ``.tmp-NAME`` was being written and is incomplete.
- ``.old-NAME`` is complete: it was moved aside for a replacement, and is restored without one.
- ``.gone-NAME`` was being removed.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import IO

import filelock

from qlora_wgpu.cache_folder import make_cache_folder
from qlora_wgpu.errors import CheckpointError, reason
from qlora_wgpu.files import BUFFER_BYTES, exists, is_dir, is_file

_TEMPORARY = ".tmp-"
_REPLACED = ".old-"
_REMOVED = ".gone-"
_LEFTOVERS = (_TEMPORARY, _REPLACED, _REMOVED)
_PAUSES = (0.01, 0.05, 0.1, 0.2, 0.4, 0.8) if sys.platform == "win32" else ()
"""Seconds to wait for programs that have a file open, such as virus scanners and ``watch``."""


def write_file(path: str | PathLike[str], content: bytes) -> None:
    """Writes or replaces a file; its permissions follow the umask.

    Devices and named pipes, such as /dev/stdout, are written to in place.
    """
    write_pieces(path, (content,))


def write_pieces(path: str | PathLike[str], pieces: Iterable[bytes | memoryview]) -> None:
    """The same as ``write_file``, for content in several pieces."""
    path = Path(path)
    with _checkpoint_errors(path):
        _refuse_folder(path)
        if exists(path) and not is_file(path):  # a device must not be replaced
            with path.open("wb") as stream:
                stream.writelines(pieces)
            return
        with _replacing(path) as temporary, temporary.open("xb", BUFFER_BYTES) as file:
            for piece in pieces:
                file.write(piece)


@contextmanager
def atomic_folder(path: str | PathLike[str]) -> Iterator[Path]:
    """Creates or replaces a folder once everything in it has been written.

    Usage: ``with atomic_folder(path) as unfinished: ...`` and write into ``unfinished``. If the
    body raises, ``path`` is unchanged.
    """
    path = Path(path)
    temporary, replaced = (path.with_name(prefix + path.name) for prefix in (_TEMPORARY, _REPLACED))
    with _checkpoint_errors(path):
        if exists(path) and not is_dir(path):
            raise NotADirectoryError(0, "it is a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        _clean_up(path)
        temporary.mkdir()
        try:
            yield temporary
            flush_tree(temporary)
            if exists(path):
                _retry(path.rename, replaced)
            _retry(temporary.rename, path)
        except BaseException:
            with suppress(OSError):
                _clean_up(path)
            raise
        _flush_folder(path.parent)
        with suppress(OSError):  # otherwise the next writer cleans up
            _clean_up(path)


@contextmanager
def atomic_file(path: str | PathLike[str]) -> Iterator[Path]:
    """Creates or replaces a file once everything in it has been written.

    Usage: ``with atomic_file(path) as unfinished: ...`` and write ``unfinished``, which has the
    same suffix. If the body raises, ``path`` is unchanged.
    """
    path = Path(path)
    with _checkpoint_errors(path):
        _refuse_folder(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _clean_up(path)
        with _replacing(path) as temporary:
            yield temporary


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    temporary = path.with_name(_TEMPORARY + path.name)
    try:
        temporary.unlink(missing_ok=True)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        _retry(temporary.replace, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def _refuse_folder(path: Path) -> None:
    if is_dir(path):
        raise IsADirectoryError(0, "it is a folder")


def append_line(path: str | PathLike[str], line: str) -> None:
    """Appends a line to a text file, or creates it.

    An incomplete last line, from a kill or a full disk, is dropped first. If writing fails, the
    file is unchanged. A line that the file already ends with is not added again: it was written,
    and only closing the file failed.
    """
    path, data = Path(path), line.encode() + b"\n"
    # Unbuffered, since closing the file would otherwise repeat a write that failed.
    with _checkpoint_errors(path), path.open("ab+", buffering=0) as file:
        end = _end_of_lines(file)
        begin = max(end - len(data) - 1, 0)  # includes the newline before it
        file.seek(begin)
        if file.read(end - begin) in (data, b"\n" + data):
            return
        try:
            file.truncate(end)
            _write_all(file, data)
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def flush_file(path: Path) -> None:
    """Flushes a file to disk."""
    with _checkpoint_errors(path), path.open("rb+") as file:
        os.fsync(file.fileno())


def remove(path: str | PathLike[str]) -> None:
    """Removes a folder or a file if it exists; a folder is renamed first."""
    path = Path(path)
    with _checkpoint_errors(path, "removed"):
        _clean_up(path)
        if exists(path):
            _discard(path, path.with_name(_REMOVED + path.name))


def recover(path: str | PathLike[str]) -> None:
    """Cleans up after killed writers of a file or folder; nobody else may be writing it."""
    with _checkpoint_errors(Path(path)):
        _clean_up(Path(path))


def recover_all(folder: Path) -> None:
    """The same as ``recover``, for everything in a folder."""
    with _checkpoint_errors(folder):
        entries = [entry.name for entry in folder.iterdir()] if is_dir(folder) else []
        prefixes = [(name, prefix) for name in entries for prefix in _LEFTOVERS]
        for name in {n.removeprefix(p) for n, p in prefixes if n.startswith(p)}:
            _clean_up(folder / name)


@contextmanager
def _checkpoint_errors(path: Path, done: str = "written") -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise CheckpointError(f"{final_name(path)} cannot be {done}: {reason(err)}") from err


def final_name(path: Path) -> Path:
    """A path without the temporary prefixes of its parts, as users know it."""
    return Path(*(part.removeprefix(_TEMPORARY) for part in path.parts))


def _clean_up(path: Path) -> None:
    temporary, replaced, removed = (path.with_name(prefix + path.name) for prefix in _LEFTOVERS)
    if exists(replaced):
        if exists(path):
            _discard(replaced, removed)
        else:  # a process was killed between the two renames of a folder
            _retry(replaced.rename, path)
    _delete(temporary)
    _delete(removed)


def _discard(path: Path, removed: Path) -> None:
    _delete(removed)
    _retry(path.rename, removed)
    _delete(removed)


def _retry(rename: Callable[[Path], Path], name: Path) -> None:
    """Renames, which fails on Windows while either file is open."""
    for seconds in _PAUSES:
        try:
            rename(name)
            return
        except PermissionError:
            time.sleep(seconds)
    rename(name)


def _delete(path: Path) -> None:
    if is_dir(path) and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _end_of_lines(file: IO[bytes]) -> int:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return 0
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return size
    file.seek(0)
    return file.read(size).rfind(b"\n") + 1


def _write_all(file: IO[bytes], data: bytes) -> None:
    while data:  # a write may be partial
        written = file.write(data)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[written:]


def flush_tree(folder: Path) -> None:
    """Flushes a folder and everything in it to disk."""
    mode = "rb+" if os.name == "nt" else "rb"  # Windows flushes only writable files
    for parent, _, names in os.walk(folder):
        for name in names:
            with (Path(parent) / name).open(mode) as file:
                os.fsync(file.fileno())
        _flush_folder(Path(parent))


def _flush_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


class FileLock:
    """A lock on a file, which everybody acquires if the file system does not support locks.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = filelock.FileLock(path, thread_local=False)
        self._taken: os.stat_result | None = None

    def acquire(self) -> bool:
        """Acquires the lock; False if another process holds it."""
        try:
            self._lock.acquire(blocking=False)
        except filelock.Timeout:
            return False
        except OSError as err:
            if err.errno not in _NO_LOCKS:
                raise
        self._taken = self.path.stat()
        return True

    @property
    def is_exclusive(self) -> bool:
        """Whether the lock is held and the file system supports locks."""
        return self._lock.is_locked

    @property
    def is_in_place(self) -> bool:
        """Whether the path is still the file that was locked."""
        try:
            return self._taken is not None and os.path.samestat(self.path.stat(), self._taken)
        except OSError:
            return False

    def release(self) -> None:
        """Releases the lock, if it is held."""
        self._lock.release()
        self._taken = None

    def remove(self) -> None:
        """Removes the file and releases the lock, in the order that Windows allows."""
        for step in (self.path.unlink, self.release, self.path.unlink):
            with suppress(OSError):
                step()


def write_cache_file(path: Path, content: str) -> str:
    """Replaces a file of the cache, unless another process is writing it; returns the problem."""
    try:
        make_cache_folder(path.parent)
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        if lock.acquire():
            write_file(path, content.encode())
            lock.release()
    except CheckpointError as err:
        return str(err)
    except OSError as err:
        return f"{path} cannot be written: {err.strerror or err}"
    return ""
