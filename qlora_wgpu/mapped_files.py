"""Memory-mapped files as arrays.

A file that is truncated while it is mapped crashes a process that reads its missing part, so its
size is checked first.
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

_HASHED = 1 << 24  # bytes to hash at a time
_maps: WeakKeyDictionary[mmap.mmap, tuple[str, int]] = WeakKeyDictionary()
map_listeners: list[Callable[[str, int], None]] = []
"""Called with the path and size of each file that is mapped."""


def map_file(path: Path, file: BufferedReader, offset: int = 0) -> npt.NDArray[np.uint8]:
    """Maps an open file from ``offset``; it must not be empty, or truncated while it is mapped."""
    mapped = np.memmap(file, np.uint8, "r", offset=offset).view(np.ndarray)
    mapping = _map_of(mapped)
    if mapping is not None:
        name, size = str(path.absolute()), os.fstat(file.fileno()).st_size
        _maps[mapping] = name, size
        for listener in map_listeners:
            listener(name, size)
    return mapped


def require_whole(array: npt.NDArray[Any]) -> None:
    """Raises a WeightFileError if a mapped array's file was truncated, before reading crashes."""
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
    """The file that an array is mapped from; None if it is not."""
    mapping = _map_of(array)
    return None if mapping is None or mapping not in _maps else _maps[mapping][0]


def is_mapped(array: npt.NDArray[Any]) -> bool:
    """Whether an array is mapped from a file."""
    return _map_of(array) is not None


def read_ahead(array: npt.NDArray[Any]) -> None:
    """Lets the system read ahead; does nothing for an array in memory."""
    _advise(array, "MADV_WILLNEED")


def let_go(array: npt.NDArray[Any]) -> None:
    """Drops a mapped array's pages from this process's memory; they stay in the page cache."""
    _advise(array, "MADV_DONTNEED")


def pieces(array: npt.NDArray[Any], size: int) -> Iterator[npt.NDArray[Any]]:
    """Pieces of ``size`` elements, each released before the next."""
    flat = array.reshape(-1)
    for begin in range(0, flat.size, size):
        piece = flat[begin : begin + size]
        require_whole(piece)
        yield piece
        let_go(piece)


def sha256(array: npt.NDArray[np.uint8], about: bytes = b"") -> hashlib._Hash:
    """A hash over ``about`` and the bytes of an array, which may be mapped."""
    digest = hashlib.sha256(about)
    for piece in pieces(array, _HASHED):
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
    with suppress(OSError):  # the system may reject the advice
        mapped.madvise(getattr(mmap, advice), first, begin + array.nbytes - first)
