"""A claim on a folder that ends with its process, and small files that several may write."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import filelock

from qlora_wgpu.cache_folder import make_cache_folder
from qlora_wgpu.checkpoint.atomic import write_file
from qlora_wgpu.errors import CheckpointError

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
