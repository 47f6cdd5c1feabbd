"""Replacing a function that a loaded library imports: its slot in the library's offset table."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

_RELA, _WRITABLE = 4, mmap.PROT_READ | mmap.PROT_WRITE
_SECTION = struct.Struct("<IIQQQQIIQQ")  # of 64-bit ELF files
_RELOCATION = struct.Struct("<QQq")
_SYMBOL = struct.Struct("<IBBHQQ")


def replace_import(folder: Path, name: str, function: int) -> None:
    """Makes all libraries that are loaded from a folder call another function by this name.

    Args:
        folder: Where the libraries are, or in folders below.
        name: The function that they import.
        function: The address of the other.

    Raises:
        LookupError: If none of them imports it.
    """
    slots = [
        base + slot
        for library, base in _loaded()
        if library.is_relative_to(folder)
        for slot in _slots(library.read_bytes(), name)
    ]
    if not slots:
        raise LookupError(f"no library that is loaded from {folder} imports {name}")
    for slot in slots:
        _write(slot, function)


def _loaded() -> Iterator[tuple[Path, int]]:
    """Libraries of this process, and where they begin."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        if path and ".so" in path[0] and int(offset, 16) == 0:
            yield Path(path[0]), int(addresses.partition("-")[0], 16)


def _slots(elf: bytes, name: str) -> Iterator[int]:
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    sections = [_SECTION.unpack_from(elf, start + i * size) for i in range(count)]
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != _RELA or not link:
            continue
        symbols = sections[link]
        names = sections[symbols[6]][4]
        for slot, info, _ in _RELOCATION.iter_unpack(elf[offset : offset + length]):
            symbol = _SYMBOL.unpack_from(elf, symbols[4] + (info >> 32) * _SYMBOL.size)
            begin = names + symbol[0]
            if elf[begin : elf.index(b"\0", begin)] == name.encode():
                yield slot


def _write(address: int, value: int) -> None:
    """Writes a pointer where the loader has left the page read-only."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = address - address % mmap.PAGESIZE
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), _WRITABLE):
        raise OSError(ctypes.get_errno(), "mprotect")
    ctypes.c_uint64.from_address(address).value = value
