"""The identity of a model's weights: a hash over every tensor, made while they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.mapped_files import let_go, sha256

_SAMPLED = 256  # tensors of a file, at most
_SAMPLE = 4096  # bytes of each


class HashedFile(Protocol):
    """What of an open file is hashed, and when."""

    path: Path
    on_read: Callable[[str], None] | None

    def names(self) -> list[str]:
        """All tensors."""

    def dtype(self, name: str) -> str:
        """A tensor's element type."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Its dimensions."""

    def stored_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """Its bytes."""


class WeightFingerprint:
    """Hashes a model's tensors in a thread, beside whoever reads them.

    Names, types, shapes and bytes count, whether a tensor is used or not; which file holds it does
    not. A tensor is hashed when it is first read, so that its bytes come from the disk once;
    hashing leaves the interpreter's lock to others.
    """

    def __init__(self, files: Mapping[str, HashedFile]) -> None:
        """Watches what is read from now on."""
        self._files = files
        self._pool = ThreadPoolExecutor(1, "fingerprint")
        self._hashes: dict[str, Future[Any]] = {}
        for file in set(files.values()):
            file.on_read = self._add

    def finish(self) -> None:
        """Hashes all that has not been read, without waiting for it."""
        for file in set(self._files.values()):
            file.on_read = None
        for name in self._files:
            self._add(name)
        self._pool.shutdown(wait=False)

    @property
    def hexdigest(self) -> str:
        """The hash over everything; waits for it."""
        whole = hashlib.sha256()
        for name in sorted(self._hashes):
            whole.update(self._hashes[name].result().digest())
        return whole.hexdigest()

    def _add(self, name: str) -> None:
        if name not in self._hashes:
            file = self._files[name]
            about = repr((name, file.dtype(name), file.shape(name))).encode()
            self._hashes[name] = self._pool.submit(sha256, file.stored_bytes(name), about)


def identity(files: Iterable[HashedFile], about: str) -> str:
    """A hash of what tells files from others without reading them: see ``ModelFolder.identity``."""
    whole = hashlib.sha256(about.encode())
    for file in sorted(set(files), key=lambda each: each.path.name):
        whole.update(repr(state_of(file.path)).encode())
        names = file.names()
        whole.update(repr([(n, file.dtype(n), file.shape(n)) for n in names]).encode())
        for name in names[:: len(names) // _SAMPLED + 1]:
            stored = file.stored_bytes(name)
            middle = stored.size // 2
            whole.update(bytes(stored[middle : middle + _SAMPLE]))
            let_go(stored)
    return whole.hexdigest()


def state_of(path: Path) -> tuple[str, int, int]:
    """What changes when a file does: its name, its size and when it was written."""
    try:
        status = path.stat()
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {err.strerror}") from err
    return path.name, status.st_size, status.st_mtime_ns
