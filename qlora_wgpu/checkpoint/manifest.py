"""What a folder holds and belongs to: a checkpoint's manifest, and a hash of a model's weights.

``manifest.json`` is written last and includes its own hash, and each file's size and hash. A folder
with a damaged, replaced or missing file is refused. Weights are hashed while they are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.errors import CheckpointError, reason
from qlora_wgpu.files import is_file, open_file
from qlora_wgpu.mapped_files import release_pages, sha256

# ---- a checkpoint's manifest ---------------------------------------------------------------------

MANIFEST = "manifest.json"
_VERSION = 1
_HASH = "sha256"


def write_manifest(folder: Path, about: Mapping[str, Any]) -> None:
    """Writes the manifest of an unfinished folder; ``about`` says what it belongs to."""
    files = {path.name: _record(path) for path in sorted(folder.iterdir()) if is_file(path)}
    body = {"format_version": _VERSION, **about, "files": files}
    text = json.dumps({**body, _HASH: _hash_of(body)}, indent=1, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """A folder's manifest, after every file has been compared with its hash."""
    path = folder / MANIFEST
    if not is_file(path):
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was written by an older version, or is incomplete"
        )
    body = read_json_object(path)
    version = body.get("format_version")
    if isinstance(version, int) and version > _VERSION:
        raise CheckpointError(f"{path} was written by a newer version of qlora-wgpu: update it")
    if body.pop(_HASH, None) != _hash_of(body) or version != _VERSION:
        raise CheckpointError(f"{path} is damaged: its own hash does not match")
    for name, record in body["files"].items():
        _check(folder / Path(name).name, record)
    return body


def _hash_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _record(path: Path) -> dict[str, Any]:
    with open_file(path) as file:
        digest = hashlib.file_digest(file, _HASH).hexdigest()
        return {"size": file.tell(), _HASH: digest}


def _check(path: Path, record: Mapping[str, Any]) -> None:
    try:
        # Reading a pipe could block for ever, and a device may have no end.
        if not is_file(path):
            raise CheckpointError(f"{path} is missing")
        size = path.stat().st_size
        if size != record["size"]:
            raise CheckpointError(f"{path} is damaged: expected {record['size']} bytes, got {size}")
        if _record(path) != record:
            raise CheckpointError(f"{path} is damaged or was replaced: its hash does not match")
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {reason(err)}") from err


# ---- a model's weights ---------------------------------------------------------------------------

_MAX_SAMPLES = 256  # tensors of a file
_SAMPLE_BYTES = 4096  # of each tensor


class HashedFile(Protocol):
    """The tensors of an open file."""

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
    """Hashes a model's tensors in a thread, without the interpreter's lock.

    The hash covers names, types, shapes and bytes of all tensors, but not which file has them. A
    tensor is hashed when it is first read, so that its bytes are read from disk once.
    """

    def __init__(self, files: Mapping[str, HashedFile]) -> None:
        self._files = files
        self._pool = ThreadPoolExecutor(1, "fingerprint")
        self._hashes: dict[str, Future[Any]] = {}
        for file in set(files.values()):
            file.on_read = self._add

    def finish(self) -> None:
        """Starts hashing everything that has not been read."""
        for file in set(self._files.values()):
            file.on_read = None
        for name in self._files:
            self._add(name)
        self._pool.shutdown(wait=False)

    @property
    def hexdigest(self) -> str:
        """The hash of all tensors; waits for it."""
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
    """A hash of files' headers, states and samples, and ``about``: ``ModelFolder.identity``."""
    whole = hashlib.sha256(about.encode())
    for file in sorted(set(files), key=lambda each: each.path.name):
        whole.update(repr(state_of(file.path)).encode())
        names = file.names()
        whole.update(repr([(n, file.dtype(n), file.shape(n)) for n in names]).encode())
        for name in names[:: len(names) // _MAX_SAMPLES + 1]:
            stored = file.stored_bytes(name)
            middle = stored.size // 2
            whole.update(bytes(stored[middle : middle + _SAMPLE_BYTES]))
            release_pages(stored)
    return whole.hexdigest()


def state_of(path: Path) -> tuple[str, int, int]:
    """A file's name, size and modification time."""
    try:
        status = path.stat()
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {err.strerror}") from err
    return path.name, status.st_size, status.st_mtime_ns
