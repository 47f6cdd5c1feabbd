"""A claim on a folder that ends with its process, and small files that several may write."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

from qlora_wgpu.cache_folder import make_cache_folder
from qlora_wgpu.checkpoint.atomic import write_file
from qlora_wgpu.errors import CheckpointError

if sys.platform == "win32":
    import msvcrt

    def _claim(descriptor: int) -> None:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as err:  # whatever its number: every file system there has locks
            raise OSError(errno.EACCES, "locked by another") from err

else:
    import fcntl

    def _claim(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


_HELD = (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK)


class FileLock:
    """A lock on a file, held by one opener at a time; the file stays when it is released.

    Where a file system has no locks, everybody gets it.

    Attributes:
        path: The file.
        is_exclusive: Whether nobody else can have it, while it is held.
    """

    def __init__(self, path: Path) -> None:
        """Does not take it yet."""
        self.path = path
        self.is_exclusive = False
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Takes it; False if somebody else has it."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _claim(descriptor)
            self.is_exclusive = True
        except OSError as err:
            if err.errno in _HELD:
                os.close(descriptor)
                return False
        self._descriptor = descriptor
        return True

    @property
    def is_in_place(self) -> bool:
        """Whether the path still leads to the file that was locked."""
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._descriptor))
        except OSError:
            return False

    def release(self) -> None:
        """Gives it back; nothing where it is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor, self.is_exclusive = None, False

    def remove(self) -> None:
        """Takes the file away and gives it back; who has it open meanwhile keeps it on Windows."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        self.release()
        if sys.platform == "win32":  # where a file that is open, here too, stays
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    def __del__(self) -> None:
        self.release()


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
