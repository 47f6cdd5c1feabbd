"""Files and folders that appear whole or not at all, and locks that end with their process.

Everything is written under a temporary name in the same folder, flushed to the disk, and renamed;
then the folder is flushed, which makes the rename itself last. What is removed is renamed first,
too, so that no folder is ever seen with some of its files. A killed process may leave three names
behind, which the next writer of that name, or ``recover``, clears up:

- ``.tmp-NAME`` was being written and is worth nothing.
- ``.old-NAME`` is whole: it was moved aside for a successor, and comes back if that did not arrive.
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
_LEFT_BEHIND = (_TEMPORARY, _REPLACED, _REMOVED)
_PAUSES = (0.01, 0.05, 0.1, 0.2, 0.4, 0.8) if sys.platform == "win32" else ()
"""Seconds to wait for what has a file open, as virus scanners and ``watch`` have for a moment."""


def write_file(path: str | PathLike[str], content: bytes) -> None:
    """Writes a file, or replaces it; its permissions follow the umask.

    What is there and no regular file, such as /dev/stdout or a named pipe, is written to as it is.
    """
    write_pieces(path, (content,))


def write_pieces(path: str | PathLike[str], pieces: Iterable[bytes | memoryview]) -> None:
    """Writes a file likewise, of pieces that follow one another."""
    path = Path(path)
    with _explained(path):
        _refuse_folder(path)
        if exists(path) and not is_file(path):  # nothing takes the place of a device
            with path.open("wb") as stream:
                stream.writelines(pieces)
            return
        with _replacing(path) as temporary, temporary.open("xb", BUFFER_BYTES) as file:
            for piece in pieces:
                file.write(piece)


@contextmanager
def atomic_folder(path: str | PathLike[str]) -> Iterator[Path]:
    """Makes a folder, or replaces it, once everything in it has been written.

    Usage: ``with atomic_folder(path) as unfinished: ...`` and write into ``unfinished``. If the
    body raises, nothing of it stays and what ``path`` held before is untouched.
    """
    path = Path(path)
    temporary, replaced = (path.with_name(prefix + path.name) for prefix in (_TEMPORARY, _REPLACED))
    with _explained(path):
        if exists(path) and not is_dir(path):
            raise NotADirectoryError(0, "it is a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        _settle(path)
        temporary.mkdir()
        try:
            yield temporary
            flush_tree(temporary)
            if exists(path):
                _renamed(path.rename, replaced)
            _renamed(temporary.rename, path)
        except BaseException:
            with suppress(OSError):
                _settle(path)
            raise
        _flush_folder(path.parent)
        with suppress(OSError):  # what is in the way is cleared up the next time
            _settle(path)


@contextmanager
def atomic_file(path: str | PathLike[str]) -> Iterator[Path]:
    """Makes a file once everything in it has been written; of the same ending before.

    Usage: ``with atomic_file(path) as unfinished: ...`` and write ``unfinished``. If the body
    raises, nothing of it stays and what ``path`` held before is untouched.
    """
    path = Path(path)
    with _explained(path):
        _refuse_folder(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _settle(path)
        with _replacing(path) as temporary:
            yield temporary


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A name to write a file under, which then takes the place of what is there."""
    temporary = path.with_name(_TEMPORARY + path.name)
    try:
        temporary.unlink(missing_ok=True)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        _renamed(temporary.replace, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def _refuse_folder(path: Path) -> None:
    if is_dir(path):
        raise IsADirectoryError(0, "it is a folder")


def append_line(path: str | PathLike[str], line: str) -> None:
    """Appends a line to a text file, which is made if it is not there.

    A last line that has no end was torn by a kill or a full disk, and is dropped first. If the new
    one cannot be written whole, nothing of it stays. A line that the file ends with already is not
    added: it was written, and only closing the file failed.
    """
    path, data = Path(path), line.encode() + b"\n"
    # Without a buffer, or closing the file would try again what has just failed.
    with _explained(path), path.open("ab+", buffering=0) as file:
        end = _end_of_lines(file)
        if _ends_with(file, end, data):
            return
        try:
            file.truncate(end)
            _write_all(file, data)
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def flush_file(path: Path) -> None:
    """Brings what was appended to a file to the disk."""
    with _explained(path), path.open("rb+") as file:
        os.fsync(file.fileno())


def remove(path: str | PathLike[str]) -> None:
    """Removes a folder or a file if it is there; a folder loses its name before its files."""
    path = Path(path)
    with _explained(path, "removed"):
        _settle(path)
        if exists(path):
            _discard(path, path.with_name(_REMOVED + path.name))


def recover(path: str | PathLike[str]) -> None:
    """Clears up what killed writers of a file or folder left beside it.

    Nobody may be writing it meanwhile.
    """
    with _explained(Path(path)):
        _settle(Path(path))


def settle_all(folder: Path) -> None:
    """Clears up what killed writers of anything in a folder left there."""
    with _explained(folder):
        entries = [entry.name for entry in folder.iterdir()] if is_dir(folder) else []
        prefixes = [(name, prefix) for name in entries for prefix in _LEFT_BEHIND]
        for name in {n.removeprefix(p) for n, p in prefixes if n.startswith(p)}:
            _settle(folder / name)


@contextmanager
def _explained(path: Path, done: str = "written") -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise CheckpointError(f"{final_name(path)} cannot be {done}: {reason(err)}") from err


def final_name(path: Path) -> Path:
    """The name that a file or folder is to get, which the user knows, not the temporary one."""
    return Path(*(part.removeprefix(_TEMPORARY) for part in path.parts))


def _settle(path: Path) -> None:
    temporary, replaced, removed = (path.with_name(prefix + path.name) for prefix in _LEFT_BEHIND)
    if exists(replaced):
        if exists(path):
            _discard(replaced, removed)
        else:  # a process was killed between the two renames of a folder
            _renamed(replaced.rename, path)
    _delete(temporary)
    _delete(removed)


def _discard(path: Path, removed: Path) -> None:
    """Takes a thing's name away and deletes it."""
    _delete(removed)
    _renamed(path.rename, removed)
    _delete(removed)


def _renamed(rename: Callable[[Path], Path], name: Path) -> None:
    """Gives a file or folder a name, which Windows refuses while it, or what has it, is open."""
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
    """Where the last whole line of an open file ends."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return 0
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return size
    file.seek(0)
    return file.read(size).rfind(b"\n") + 1


def _ends_with(file: IO[bytes], end: int, line: bytes) -> bool:
    begin = end - len(line) - 1  # and the line end before it
    file.seek(max(begin, 0))
    return file.read(end - max(begin, 0)) == (line if begin < 0 else b"\n" + line)


def _write_all(file: IO[bytes], data: bytes) -> None:
    while data:  # a write may take a part
        written = file.write(data)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[written:]


def flush_tree(folder: Path) -> None:
    """Flushes all files and folders below a folder, and itself, to the disk."""
    mode = "rb+" if os.name == "nt" else "rb"  # Windows flushes only what can be written
    for parent, _, names in os.walk(folder):
        for name in names:
            with (Path(parent) / name).open(mode) as file:
                os.fsync(file.fileno())
        _flush_folder(Path(parent))


def _flush_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows opens no folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


class FileLock:
    """A lock on a file, held by one opener at a time; where there are none, everybody gets it.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        """Does not take it yet."""
        self.path = path
        self._lock = filelock.FileLock(path, thread_local=False)
        self._taken: os.stat_result | None = None

    def acquire(self) -> bool:
        """Takes it; False if somebody else has it."""
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
        """Whether it is held, and nobody else can have it."""
        return self._lock.is_locked

    @property
    def is_in_place(self) -> bool:
        """Whether the path still leads to the file that was taken."""
        try:
            return self._taken is not None and os.path.samestat(self.path.stat(), self._taken)
        except OSError:
            return False

    def release(self) -> None:
        """Gives it back; nothing where it is not held."""
        self._lock.release()
        self._taken = None

    def remove(self) -> None:
        """Takes the file away and gives it back, whichever of the two Windows does first."""
        for step in (self.path.unlink, self.release, self.path.unlink):
            with suppress(OSError):
                step()


def write_cache_file(path: Path, content: str) -> str:
    """Replaces a file of the cache, unless another process is writing it just now."""
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
