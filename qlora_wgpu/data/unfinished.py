"""Folders in which a process prepares something, known by a lock while it does.

``.unfinished-X.lock`` is made and held before ``.unfinished-X``, and removed after it, so that a
folder without its lock's holder is one that a killed process left.
"""

from __future__ import annotations

import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from qlora_wgpu.checkpoint import FileLock
from qlora_wgpu.presence import exists

_PREFIX, _LOCK = ".unfinished-", ".lock"
_STALE_SECONDS = 3600  # for folders of older versions, whose locks are elsewhere


class Unfinished:
    """A folder that is being filled.

    Attributes:
        path: The folder.
    """

    def __init__(self, parent: Path) -> None:
        """Makes it, under a name of its own.

        Raises:
            OSError: If it cannot be made.
        """
        self._lock = _new_lock(parent)
        self.path = self._lock.path.with_suffix("")
        try:
            self.path.mkdir(mode=0o700)
        except BaseException:
            self.discard()
            raise

    def publish(self, folder: Path) -> None:
        """Gives it its final name, unless another process has just made the same.

        Raises:
            OSError: If it cannot be renamed.
        """
        if not exists(folder):
            self.path.rename(folder)

    def discard(self) -> None:
        """Removes what is left of it; what cannot be is swept up by a later process."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.remove()


def sweep(parent: Path) -> None:
    """Removes what killed processes left, and nothing that another is filling."""
    with suppress(OSError):
        for entry in list(parent.iterdir()):
            if entry.name.startswith(_PREFIX):
                with suppress(OSError):
                    _sweep(entry)


def _sweep(entry: Path) -> None:
    if entry.suffix != _LOCK:
        if not exists(entry.with_name(entry.name + _LOCK)) and _is_old(entry):
            shutil.rmtree(entry, ignore_errors=True)
        return
    lock = FileLock(entry)
    if lock.acquire() and lock.is_exclusive:
        shutil.rmtree(entry.with_suffix(""), ignore_errors=True)
        if not exists(entry.with_suffix("")):
            lock.remove()
    lock.release()


def _new_lock(parent: Path) -> FileLock:
    while True:
        lock = FileLock(parent / f"{_PREFIX}{secrets.token_hex(6)}{_LOCK}")
        # A sweeper may take it between its making and its claim.
        if lock.acquire() and lock.is_in_place:
            return lock
        lock.release()


def _is_old(folder: Path) -> bool:
    newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    return time.time() - newest > _STALE_SECONDS
