"""Files as arrays, which the system reads when they are looked at.

Their pages count as the system's once they are let go of. A file that becomes shorter while it is
mapped ends the process that looks at what is gone, so that is asked first.
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

_HASHED = 1 << 24  # bytes that are hashed at a time
_maps: WeakKeyDictionary[mmap.mmap, tuple[str, int]] = WeakKeyDictionary()
map_listeners: list[Callable[[str, int], None]] = []
"""Called with path and size of each file that is mapped."""


def map_file(path: Path, file: BufferedReader, offset: int = 0) -> npt.NDArray[np.uint8]:
    """The bytes of an open file from ``offset`` on, read when they are looked at.

    There must be one, and none may go while they are mapped: how many there are is remembered.
    """
    mapped = np.memmap(file, np.uint8, "r", offset=offset).view(np.ndarray)
    mapping = _map_of(mapped)
    if mapping is not None:
        name, size = str(path.absolute()), os.fstat(file.fileno()).st_size
        _maps[mapping] = name, size
        for listener in map_listeners:
            listener(name, size)
    return mapped


def require_whole(array: npt.NDArray[Any]) -> None:
    """Sees that a mapped array's file is as long as it was; nothing for an array in memory.

    The system ends a process that looks at what a file no longer has.

    Raises:
        WeightFileError: If it is shorter.
    """
    mapping = _map_of(array)
    if mapping is None or mapping not in _maps:
        return
    path, size = _maps[mapping]
    if (left := mapping.size()) < size:
        raise WeightFileError(str(TruncatedFile(path, left, size)))


def read_now(array: npt.NDArray[Any]) -> None:
    """Waits until the system has read all of a mapped array's pages."""
    int(array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].sum())


def path_of(array: npt.NDArray[Any]) -> str | None:
    """The file that an array is mapped from."""
    mapping = _map_of(array)
    return None if mapping is None or mapping not in _maps else _maps[mapping][0]


def is_mapped(array: npt.NDArray[Any]) -> bool:
    """Whether an array's bytes are a file's, which the system reads when they are looked at."""
    return _map_of(array) is not None


def expect(array: npt.NDArray[Any]) -> None:
    """Lets the system read a mapped array ahead; nothing for one in memory."""
    _advise(array, "MADV_WILLNEED")


def let_go(array: npt.NDArray[Any]) -> None:
    """Takes a mapped array's pages out of this process's memory; they can be looked at again.

    The system keeps them for as long as it has room, and counts them as its own.
    """
    _advise(array, "MADV_DONTNEED")


def pieces(array: npt.NDArray[Any], size: int) -> Iterator[npt.NDArray[Any]]:
    """The elements of an array so many at a time, each piece let go of before the next."""
    flat = array.reshape(-1)
    for begin in range(0, flat.size, size):
        piece = flat[begin : begin + size]
        require_whole(piece)
        yield piece
        let_go(piece)


def sha256(array: npt.NDArray[np.uint8], about: bytes = b"") -> hashlib._Hash:
    """A hash over bytes that may be a file's, and before them over what is said of them."""
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
    with suppress(OSError):  # advice that the system does not take
        mapped.madvise(getattr(mmap, advice), first, begin + array.nbytes - first)
