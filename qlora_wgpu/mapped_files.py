"""Memory-mapped files as arrays.

Released pages count as the system's memory. Reading beyond the end of a file that was truncated
while it is mapped would kill the process, so its size is checked first.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import WeightFileError
from qlora_wgpu.supervision.child import TruncatedFile

_HASH_BYTES = 1 << 24  # hashed at a time
_maps: WeakKeyDictionary[mmap.mmap, tuple[str, int]] = WeakKeyDictionary()
map_listeners: list[Callable[[str, int], None]] = []
"""Called with the path and size of each file that is mapped."""


def map_file(path: Path, file: BufferedReader, offset: int = 0) -> npt.NDArray[np.uint8]:
    """The bytes of an open file from ``offset``, of which there must be at least one.

    The file's size is recorded for ``check_not_truncated``.
    """
    mapped = np.memmap(file, np.uint8, "r", offset=offset).view(np.ndarray)
    mapping = _map_of(mapped)
    if mapping is not None:
        name, size = str(path.absolute()), os.fstat(file.fileno()).st_size
        _maps[mapping] = name, size
        for listener in map_listeners:
            listener(name, size)
    return mapped


def check_not_truncated(array: npt.NDArray[Any]) -> None:
    """Raises a WeightFileError if a mapped array's file has become shorter."""
    mapping = _map_of(array)
    if mapping is None or mapping not in _maps:
        return
    path, size = _maps[mapping]
    if (left := mapping.size()) < size:
        raise WeightFileError(str(TruncatedFile(path, left, size)))


def read_now(array: npt.NDArray[Any]) -> None:
    """Reads all pages of a mapped array."""
    int(array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].sum())


def path_of(array: npt.NDArray[Any]) -> str | None:
    """The file that an array is mapped from, or None."""
    mapping = _map_of(array)
    return None if mapping is None or mapping not in _maps else _maps[mapping][0]


def is_mapped(array: npt.NDArray[Any]) -> bool:
    """Whether an array is mapped from a file."""
    return _map_of(array) is not None


def prefetch(array: npt.NDArray[Any]) -> None:
    """Lets the system read a mapped array ahead."""
    _advise(array, "MADV_WILLNEED")


def release_pages(array: npt.NDArray[Any]) -> None:
    """Removes a mapped array's pages from this process's memory; they are read again on access."""
    _advise(array, "MADV_DONTNEED")


def pieces(array: npt.NDArray[Any], size: int) -> Iterator[npt.NDArray[Any]]:
    """An array's elements, ``size`` at a time; each piece is released before the next."""
    flat = array.reshape(-1)
    for begin in range(0, flat.size, size):
        piece = flat[begin : begin + size]
        check_not_truncated(piece)
        yield piece
        release_pages(piece)


def sha256(array: npt.NDArray[np.uint8], prefix: bytes = b"") -> hashlib._Hash:
    """A hash over ``prefix`` and an array's bytes."""
    digest = hashlib.sha256(prefix)
    for piece in pieces(array, _HASH_BYTES):
        digest.update(piece.data)
    return digest


def _map_of(array: npt.NDArray[Any]) -> mmap.mmap | None:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def _advise(array: npt.NDArray[Any], advice: str) -> None:
    mapped = _map_of(array)
    if mapped is None or not array.nbytes or not hasattr(mmap, advice):
        return
    begin = array.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError):  # the system does not support it
        mapped.madvise(getattr(mmap, advice), first, begin + array.nbytes - first)
