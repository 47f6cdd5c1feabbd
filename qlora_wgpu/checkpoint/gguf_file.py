"""GGUF files, mapped into memory: their header, and one or all parts of a split model.

gguf's own reader takes 10 s and 700 MB for a vocabulary of 262,144 tokens, since it makes an array
for each string, and accepts strings longer than the file. This one trusts no length in the header.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.safetensors_file import HeaderError, nearest
from qlora_wgpu.errors import CheckpointError, brief, reason
from qlora_wgpu.files import LFS_PREFIX, is_there, open_file
from qlora_wgpu.limits import (
    GGUF_HEADER_BYTES,
    GGUF_KEYS,
    GGUF_NAME_BYTES,
    GGUF_STRINGS,
    MATRIX_ELEMENTS,
    TENSORS,
)
from qlora_wgpu.mapped_files import map_file

# ---- element types -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ElementType:
    """An element type."""

    number: int  # in files
    name: str  # llama.cpp's, for example "Q4_K"
    block: int  # elements of a block
    nbytes: int  # bytes of a block
    is_float: bool = False  # whether elements are plain floats

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row."""
        return columns // self.block * self.nbytes


FLOATS = {
    0: ElementType(0, "F32", 1, 4, True),
    1: ElementType(1, "F16", 1, 2, True),
    28: ElementType(28, "F64", 1, 8, True),
    30: ElementType(30, "BF16", 1, 2, True),
}
"""Types of unquantized weights."""

_QUANTIZED = (
    *((2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24)),
    *((8, "Q8_0", 32, 34), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144)),
    *((13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (16, "IQ2_XXS", 256, 66)),
    *((17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50)),
    *((20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82)),
    *((23, "IQ4_XS", 256, 136), (29, "IQ1_M", 256, 56), (34, "TQ1_0", 256, 54)),
    *((35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17)),
)
_OTHERS = (
    *((9, "Q8_1", 32, 40), (15, "Q8_K", 256, 292), (24, "I8", 1, 1), (25, "I16", 1, 2)),
    *((26, "I32", 1, 4), (27, "I64", 1, 8), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18)),
)

QUANTIZED = {entry[0]: ElementType(*entry) for entry in _QUANTIZED}
"""Types that can be dequantized."""

TYPES = FLOATS | QUANTIZED | {entry[0]: ElementType(*entry) for entry in _OTHERS}
"""All known types, by number; others than ``FLOATS`` and ``QUANTIZED`` are not read."""


# ---- the header ----------------------------------------------------------------------------------

MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # 1 had other counts; big-endian files have 3 with its bytes swapped
_DIMENSIONS = 4
_ALIGNMENT = 32  # the default
_MAX_ALIGNMENT = 1 << 20
_DAMAGED = "download or copy it again"

_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}
_NUMBERS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorPlace:
    """A tensor's type, shape and place in the file."""

    type: ElementType
    shape: tuple[int, ...]  # rows before columns, as in NumPy
    begin: int  # first byte in the file
    end: int  # byte after the last


@dataclass(frozen=True)
class Header:
    """A file's header."""

    # Values by key: numbers, booleans, text, NumPy arrays of numbers, lists of strings as bytes
    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]  # by name
    nbytes: int  # of the header


def read_header(data: memoryview) -> Header:
    """Reads and checks the header of a file."""
    size = len(data)
    if size < 24:
        raise HeaderError(f"is not a GGUF file: it has only {size} bytes")
    if bytes(data[:4]) != MAGIC:
        raise HeaderError("is not a GGUF file: it does not begin with GGUF")
    cursor = _Cursor(data)
    version = cursor.number("<I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in _VERSIONS:
            raise HeaderError("is for big-endian machines: use the little-endian file")
        raise HeaderError(
            f"has GGUF version {version}, which is not supported (supported: "
            f"{', '.join(map(str, _VERSIONS))}): convert the model with a current llama.cpp"
        )
    num_tensors, num_keys = cursor.number("<Q"), cursor.number("<Q")
    for count, limit, what in ((num_tensors, TENSORS, "tensors"), (num_keys, GGUF_KEYS, "keys")):
        if count > limit:
            raise HeaderError(f"has {count} {what}, more than the {limit:,} allowed")
    metadata = _read_metadata(cursor, num_keys)
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    is_valid = type(alignment) is int and 0 < alignment <= _MAX_ALIGNMENT
    if not is_valid or alignment & (alignment - 1):
        raise HeaderError(f"has general.alignment {brief(alignment)}, which is not a power of two")
    begin = -(-cursor.at // alignment) * alignment
    return Header(metadata, _places(entries, begin, alignment, size), cursor.at)


class _Cursor:
    """Reads a header from the beginning, and never beyond the file's bytes."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._size = len(data)
        self.at = len(MAGIC)

    def take(self, count: int, what: str = "its header") -> memoryview:
        end = self.at + count
        if end > self._size:
            raise HeaderError(
                f"is truncated or damaged: {what} would end at byte {end}, the file has "
                f"{self._size}; {_DAMAGED}"
            )
        if end > GGUF_HEADER_BYTES:
            raise HeaderError(f"has a header of more than the {GGUF_HEADER_BYTES:,} bytes allowed")
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def number(self, form: str) -> int:
        """The next number, in ``struct``'s format."""
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def string(self, what: str) -> bytes:
        return bytes(self.take(self.number("<Q"), what))

    def strings(self, count: int, what: str) -> list[bytes]:
        if count > (self._size - self.at) // 8:
            self.take(8 * count, what)  # raises
        if count > GGUF_STRINGS:
            raise HeaderError(
                f"has {what} with {count:,} strings, more than the {GGUF_STRINGS:,} allowed"
            )
        return [self.string(what) for _ in range(count)]


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = _text(cursor.string("a key"), "a key", GGUF_NAME_BYTES)
        if key in metadata:
            raise HeaderError(f"has the key {brief(key)} twice: {_DAMAGED}")
        metadata[key] = _read_value(cursor, cursor.number("<I"), key)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str) -> Any:
    what = f"the value of {brief(key)}"
    if kind == _STRING:
        return _text(cursor.string(what), what, GGUF_HEADER_BYTES)
    if kind != _ARRAY:
        return _numbers(cursor, kind, 1, what)[0].item()
    kind, count = cursor.number("<I"), cursor.number("<Q")
    if kind == _STRING:
        return cursor.strings(count, what)
    return _numbers(cursor, kind, count, what)


def _numbers(cursor: _Cursor, kind: int, count: int, what: str) -> Any:
    if kind not in _NUMBERS:
        raise HeaderError(f"has {what} of unknown type {kind}: {_DAMAGED}")
    dtype = np.dtype(_NUMBERS[kind])
    return np.frombuffer(bytes(cursor.take(dtype.itemsize * count, what)), dtype)


def _text(raw: bytes, what: str, limit: int) -> str:
    if len(raw) > limit:
        raise HeaderError(f"has {what} of {len(raw):,} bytes, more than the {limit:,} allowed")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise HeaderError(f"has {what} that is not valid UTF-8: {_DAMAGED}") from None


_Entry = tuple[str, ElementType, tuple[int, ...], int]


def _read_entry(cursor: _Cursor) -> _Entry:
    """A tensor's name, type, shape, and offset after the header."""
    name = _text(cursor.string("a tensor's name"), "a tensor's name", GGUF_NAME_BYTES)
    what = f"tensor {brief(name)}"
    count = cursor.number("<I")
    if not 1 <= count <= _DIMENSIONS:
        raise HeaderError(f"has {what} with {count} dimensions, not 1 to {_DIMENSIONS}: {_DAMAGED}")
    sizes = tuple(cursor.number("<Q") for _ in range(count))
    number, offset = cursor.number("<I"), cursor.number("<Q")
    if number not in TYPES:
        raise HeaderError(
            f"has {what} of unknown type {number} (known: "
            f"{', '.join(t.name for t in TYPES.values())})"
        )
    if not all(sizes) or math.prod(sizes) > MATRIX_ELEMENTS:
        raise HeaderError(f"has {what} of invalid shape {brief(sizes[::-1])}: {_DAMAGED}")
    kind = TYPES[number]
    if sizes[0] % kind.block:
        raise HeaderError(
            f"has {what} with rows of {sizes[0]} elements, not a multiple of {kind.name}'s blocks "
            f"of {kind.block}: {_DAMAGED}"
        )
    return name, kind, sizes[::-1], offset


def _places(entries: list[_Entry], begin: int, alignment: int, size: int) -> dict[str, TensorPlace]:
    places: dict[str, TensorPlace] = {}
    for name, kind, shape, offset in entries:
        first = begin + offset
        end = first + math.prod(shape[:-1]) * kind.row_bytes(shape[-1])
        if name in places:
            raise HeaderError(f"has the tensor {brief(name)} twice: {_DAMAGED}")
        if offset % alignment:
            raise HeaderError(
                f"has tensor {brief(name)} at offset {offset}, not a multiple of {alignment}: "
                f"{_DAMAGED}"
            )
        if end > size:
            raise HeaderError(
                f"is truncated or damaged: tensor {brief(name)} would end at byte {end}, the file "
                f"has {size}; {_DAMAGED}"
            )
        places[name] = TensorPlace(kind, shape, first, end)
    ordered = sorted(places.items(), key=lambda item: item[1].begin)
    for (one, left), (other, right) in pairwise(ordered):
        if right.begin < left.end:
            raise HeaderError(
                f"is damaged: tensors {brief(one)} and {brief(other)} overlap; {_DAMAGED}"
            )
    return places


# ---- the file ------------------------------------------------------------------------------------

SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as stored."""

    place: TensorPlace
    data: npt.NDArray[np.uint8]  # a view of the file, or from the metadata

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """(rows, bytes of a row)."""
        return self.data.reshape(-1, self.place.type.row_bytes(self.place.shape[-1]))


class GGUFFile:
    """An open model; tensors are read on demand.

    Attributes:
        path: The file, or the first part of a split model.
        paths: All parts.
        metadata: Values by key, as in ``Header``.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        """Opens a file, or all parts of a split model by the path of any."""
        paths = parts_of(Path(path))
        self.path, self.paths = paths[0], tuple(paths)
        parts = [_open(part) for part in paths]
        self.metadata = parts[0][0].metadata
        _check_parts(paths, [header for header, _ in parts])
        self._headers: list[npt.NDArray[np.uint8]] = []
        self._tensors: dict[str, StoredTensor] = {}
        self._numbers: dict[str, StoredTensor] = {}
        for part, (header, data) in zip(paths, parts, strict=True):
            self._headers.append(data[: header.nbytes])
            for name, place in header.tensors.items():
                if name in self._tensors:
                    raise CheckpointError(f"{part}: another part also has tensor {brief(name)}")
                self._tensors[name] = StoredTensor(place, data[place.begin : place.end])

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """All tensors, by llama.cpp's names."""
        return list(self._tensors)

    def tensor(self, name: str) -> StoredTensor:
        """A tensor by llama.cpp's name."""
        found = self._tensors.get(name) or self._numbers.get(name)
        if found is None:
            raise CheckpointError(
                f"{self.path} has no tensor {brief(name)}{nearest(name, self.names())}"
            )
        return found

    def add_number(self, name: str, value: float) -> None:
        """Makes a number of the metadata available by ``tensor``, but not in ``names``."""
        data = np.array([value], "<f4").view(np.uint8)
        place = TensorPlace(TYPES[0], (1,), 0, data.nbytes)
        self._numbers[name] = StoredTensor(place, data)

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor in float32."""
        place = self.tensor(name).place
        if place.type.name != "F32":
            raise CheckpointError(f"{self.path}: {name} must be F32, got {place.type.name}")
        return self.tensor(name).data.view("<f4").reshape(place.shape)

    @cached_property
    def header_digest(self) -> str:
        """A hash of all headers."""
        digest = hashlib.sha256()
        for header in self._headers:
            digest.update(header.data)
        return digest.hexdigest()


def parts_of(path: Path) -> list[Path]:
    """The path, or all parts of a split model."""
    split = split_name(path.name)
    if split is None:
        return [path]
    base, count = split
    parts = [path.with_name(name) for name in part_names(base, count)]
    missing = [part.name for part in parts if not is_there(part)]
    if missing:
        raise CheckpointError(
            f"{missing[0]} is missing from {path.parent} ({len(missing)} of {count} parts are "
            "missing): download all of them"
        )
    return parts


def part_names(base: str, count: int) -> list[str]:
    """The file names of a split model."""
    return [f"{base}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]


def split_name(name: str) -> tuple[str, int] | None:
    """The common start of a split model's file names, and their number; None if not split."""
    found = _PART.fullmatch(name)
    return None if found is None or int(found[3]) == 0 else (found[1], int(found[3]))


def _open(path: Path) -> tuple[Header, npt.NDArray[np.uint8]]:
    try:
        with open_file(path) as file:
            start = file.read(64)
            if start.startswith(LFS_PREFIX):
                raise HeaderError("is a Git LFS pointer, not the weights: run git lfs pull")
            if not start:
                raise HeaderError("is empty: download or copy it again")
            data = map_file(path, file)
            return read_header(data.data), data
    except HeaderError as err:
        raise CheckpointError(f"{path} {err}") from err
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {reason(err)}") from err


def _check_parts(paths: list[Path], headers: list[Header]) -> None:
    """Checks that each part has the number in its name."""
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        count, place = (header.metadata.get(f"split.{key}") for key in ("count", "no"))
        if len(paths) == 1 and count in (None, 0, 1):
            continue
        if count != len(paths) or place != number:
            raise CheckpointError(
                f"{path} is part {brief(place)} of {brief(count)} by its metadata, but part "
                f"{number} of {len(paths)} by its name (counted from 0): name the parts as "
                "llama.cpp's gguf-split does, NAME-00001-of-0000N.gguf"
            )
