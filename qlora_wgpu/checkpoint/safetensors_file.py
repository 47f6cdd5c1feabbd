"""Safetensors files, read and written tensor by tensor through a memory map.

Format: 8 bytes of header length (little-endian), a JSON object, then the tensors' bytes. Every byte
of the data belongs to exactly one tensor. Within the limits of ``limits.py``, exactly the files
that the safetensors library accepts are accepted, so that both read the same model.

The library itself would copy every tensor and then the whole file, which may be gigabytes.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from qlora_wgpu.bfloat16 import from_bfloat16
from qlora_wgpu.checkpoint.atomic import final_name, write_pieces
from qlora_wgpu.errors import CheckpointError, brief, reason
from qlora_wgpu.files import LFS_PREFIX, open_file
from qlora_wgpu.limits import DIMENSIONS, HEADER_BYTES, TENSORS
from qlora_wgpu.mapped_files import map_file, pieces

# ---- other kinds of files ------------------------------------------------------------------------

_OTHER_FORMATS = (
    (LFS_PREFIX, "is a Git LFS pointer, not the weights: run git lfs pull"),
    (b"PK\x03\x04", "is a PyTorch or zip file, not safetensors: save the model as safetensors"),
    (b"\x80\x02", "is a PyTorch pickle, not safetensors: save the model as safetensors"),
    (b"GGUF", "is a GGUF file, not safetensors: rename it to NAME.gguf, and use its own path"),
    (b"<", "is a web page, not the weights: download it again, logged in if the model requires it"),
)


def other_format(start: bytes) -> str | None:
    """The end of a message about a file that is not safetensors, by its first 64 bytes.

    A safetensors file starts with the length of its header, 8 bytes of which the last four are
    zero, so it is never mistaken for another.
    """
    for prefix, message in _OTHER_FORMATS:
        if start.lstrip().startswith(prefix) and start[4:8] != bytes(4):
            return message
    return None


# ---- names of the format -------------------------------------------------------------------------

NUMPY_DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
    "F8_E4M3FNUZ": "u1", "F8_E5M2FNUZ": "u1", "U16": "<u2", "I16": "<i2", "F16": "<f2",
    "BF16": "<u2", "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8",
    "F64": "<f8", "C64": "<c8",
}  # fmt: skip
"""NumPy's dtype of an element: uint16 for bfloat16, uint8 for 8-bit floats."""

BITS = {name: 8 * np.dtype(dtype).itemsize for name, dtype in NUMPY_DTYPES.items()}
BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of an element."""

TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
"""PyTorch's names of the dtypes of weights."""

FLOATS = tuple(TORCH_NAMES)
"""The dtypes of weights."""

METADATA = {"format": "pt"}
"""A model file's metadata, which transformers requires."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


# ---- errors in a header --------------------------------------------------------------------------


class HeaderError(Exception):
    """An error in a header, as the end of a message that starts with the file's name."""


Place = tuple[int, int]
"""The first byte of a tensor, counted from the end of the header, and the byte after its last."""


def check_header(raw: bytes, data_bytes: int) -> None:
    """Explains why the library refused a header, by raising a HeaderError."""
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as err:
        raise HeaderError(f"is damaged: its header is not UTF-8 at byte {8 + err.start}") from err
    except (RecursionError, ValueError) as err:
        raise HeaderError(f"is damaged: its header is not JSON ({err})") from err
    if not isinstance(header, dict):
        raise HeaderError("is damaged: its header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    is_map = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if metadata is not None and not is_map:
        raise HeaderError("is damaged: its metadata is not a map of strings")
    places = {name: _place(name, value) for name, value in header.items()}
    _check_cover(places, data_bytes, 8 + len(raw))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise HeaderError(f"is damaged: its header lists {brief(twice)} twice")
    return result


def _place(name: str, value: Any) -> Place:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= set(value):
        raise HeaderError(
            f"is damaged: tensor {brief(name)} must have dtype, shape and data_offsets"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise HeaderError(f"has tensor {brief(name)} with unknown dtype {brief(dtype)}")
    if not _are_sizes(shape):
        raise HeaderError(f"is damaged: tensor {brief(name)} has shape {str(shape)[:80]}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError(f"is damaged: tensor {brief(name)} has data_offsets {str(offsets)[:80]}")
    _check_size(name, dtype, shape, offsets[1] - offsets[0])
    return offsets[0], offsets[1]


def _check_size(name: str, dtype: str, shape: list[int], nbytes: int) -> None:
    bits = BITS[dtype]
    for size in shape:
        bits = min(bits * size, 2**80)  # the product could become arbitrarily large
    if bits != 8 * nbytes:
        raise HeaderError(
            f"is damaged: tensor {brief(name)}, {dtype} {brief(shape)}, needs {-(-bits // 8)} "
            f"bytes, but its data_offsets give it {nbytes}"
        )


def _are_sizes(value: Any) -> bool:
    """Whether a value is a list of integers from 0 to 2^63 - 1, without booleans."""
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**63 for x in value)


def _check_cover(places: Mapping[str, Place], data_bytes: int, header_bytes: int) -> None:
    """Requires that every byte belongs to exactly one tensor."""
    reached = 0
    last = ""
    for name, (begin, end) in sorted(places.items(), key=lambda item: item[1]):
        if begin < reached:
            raise HeaderError(f"is damaged: tensors {brief(last)} and {brief(name)} overlap")
        if begin > reached:
            raise HeaderError(
                f"is damaged: {begin - reached} bytes before tensor {brief(name)} belong to no "
                "tensor"
            )
        reached, last = end, name
    if reached > data_bytes:
        raise HeaderError(
            f"is truncated: expected {header_bytes + reached} bytes, got "
            f"{header_bytes + data_bytes}; download or copy it again"
        )
    if reached < data_bytes:
        raise HeaderError(f"is damaged: its last {data_bytes - reached} bytes belong to no tensor")


# ---- the header ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's entry in the header."""

    dtype: str  # for example "BF16"
    shape: tuple[int, ...]
    begin: int  # first byte, counted from the end of the header
    end: int  # byte after the last


def read_header(
    path: Path, raw: bytes, data_bytes: int
) -> tuple[dict[str, TensorEntry], Mapping[str, str]]:
    """Reads and checks a header."""
    with _header_errors(raw, data_bytes), safe_open(path, framework="numpy") as file:
        names, metadata = set(file.keys()), file.metadata() or {}
    if len(names) > TENSORS:
        raise HeaderError(f"lists {len(names)} tensors, more than the {TENSORS} allowed")
    entries = _entries(raw)
    last = max((entry.end for entry in entries.values()), default=0)
    if entries.keys() != names or last != data_bytes:
        raise HeaderError("changed while it was read: try again")
    return entries, metadata


def _entries(raw: bytes) -> dict[str, TensorEntry]:
    try:
        header = json.loads(raw)
    except ValueError as err:  # a number with more digits than Python reads, in an unused field
        raise HeaderError(f"has a header that cannot be read: {err}") from err
    header.pop("__metadata__", None)
    return {name: _entry(name, value) for name, value in header.items()}


def _entry(name: str, value: Any) -> TensorEntry:
    keys = ("dtype", "shape", "data_offsets")
    dtype, shape, (begin, end) = value if isinstance(value, list) else [value[k] for k in keys]
    if len(shape) > DIMENSIONS:
        raise HeaderError(
            f"has shape {brief(shape)} for tensor {brief(name)}: at most {DIMENSIONS} dimensions "
            "are supported"
        )
    if isinstance(dtype, dict):  # {"F32": null}, which the library accepts as "F32"
        (dtype,) = dtype
    return TensorEntry(dtype, tuple(shape), begin, end)


@contextmanager
def _header_errors(raw: bytes, data_bytes: int) -> Iterator[None]:
    """Turns the library's exceptions into messages that say what is damaged."""
    try:
        yield
    except HeaderError:
        raise
    except BaseException as err:
        # The library's panics are not Exceptions; an interrupt must be passed on.
        if not isinstance(err, Exception) and type(err).__name__ != "PanicException":
            raise
        check_header(raw, data_bytes)
        raise HeaderError(f"is damaged: {' '.join(str(err).split())[:300]}") from err


# ---- the file ------------------------------------------------------------------------------------

_PIECE = 1 << 22  # numbers that are read at a time
_MAX_COMPARED = 20_000  # names: comparing more takes seconds


class SafetensorsFile:
    """An open safetensors file; tensors are read on demand.

    Attributes:
        path: The file.
        metadata: The file's metadata, strings by name.
        on_read: Called with the name of each tensor that is about to be read.
    """

    on_read: Callable[[str], None] | None = None

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._entries, self.metadata, self._data = _open(self.path)
        except HeaderError as err:
            raise CheckpointError(f"{self.path} {err}") from err
        except OSError as err:
            raise CheckpointError(f"{self.path} cannot be read: {err.strerror}") from err

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._data = None  # arrays from ``raw`` keep the map alive

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """All tensors, in the order of the header."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """A tensor's dtype by the format's name, for example "BF16"."""
        return self._entry(name).dtype

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A tensor as a read-only view of the file; bfloat16 as uint16, 8-bit floats as uint8."""
        entry = self._entry(name)
        if entry.dtype not in NUMPY_DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has dtype {entry.dtype}, which is not supported"
            )
        if self.on_read is not None:
            self.on_read(name)
        array = self.stored_bytes(name).view(NUMPY_DTYPES[entry.dtype])
        try:
            return array.reshape(entry.shape)
        except (ValueError, OverflowError) as err:  # no elements, but huge dimensions
            raise CheckpointError(
                f"{self.path}: tensor {brief(name)} has shape {brief(entry.shape)}, which NumPy "
                "does not support"
            ) from err

    def stored_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes as a read-only view of the file."""
        entry = self._entry(name)
        if self._data is None:
            raise ValueError(f"{self.path} is closed")
        return self._data[entry.begin : entry.end]

    def float32(self, name: str, part: tuple[int | slice, ...] = ()) -> npt.NDArray[np.float32]:
        """A copy of a tensor of floats, or a part of it, as float32.

        float64 numbers beyond float32's range become infinite.
        """
        dtype = self.dtype(name)
        if dtype not in FLOATS:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has dtype {dtype}, but weights must be "
                f"{', '.join(FLOATS[:-1])} or {FLOATS[-1]}"
            )
        raw = self.raw(name)[part] if part else self.raw(name)
        floats, end = np.empty(raw.size, np.float32), 0
        for piece in pieces(raw, _PIECE):
            begin, end = end, end + piece.size
            with np.errstate(over="ignore"):
                floats[begin:end] = from_bfloat16(piece) if dtype == "BF16" else piece
        return floats.reshape(raw.shape)

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}{nearest(name, self.names())}"
            ) from None


def nearest(name: str, names: list[str]) -> str:
    """The end of a message about a missing tensor: empty, or "; did you mean 'y'?"."""
    leaf = name.rpartition(".")[2]
    candidates = [n for n in names if n.rpartition(".")[2] == leaf] or names
    close = difflib.get_close_matches(name, candidates[:_MAX_COMPARED], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _open(
    path: Path,
) -> tuple[dict[str, TensorEntry], Mapping[str, str], npt.NDArray[np.uint8] | None]:
    with open_file(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        start = file.read(64)
        if not start:
            raise HeaderError("is empty: download or copy it again")
        if message := other_format(start):
            raise HeaderError(message)
        if size < 8:
            raise HeaderError(f"is not a safetensors file: it has only {size} bytes")
        length = int.from_bytes(start[:8], "little")
        if length > HEADER_BYTES:
            raise HeaderError(
                f"is not a safetensors file: its header would have {length} bytes, more than the "
                f"{HEADER_BYTES} allowed"
            )
        if length > size - 8:
            raise HeaderError(
                f"is truncated: its header should have {length} bytes, but the file has {size}; "
                "download or copy it again"
            )
        file.seek(8)
        entries, metadata = read_header(path, file.read(length), size - 8 - length)
        if size == 8 + length:  # nothing to map
            return entries, metadata, np.empty(0, np.uint8)
        return entries, metadata, map_file(path, file, 8 + length)


# ---- writing -------------------------------------------------------------------------------------

# The library's order: the largest elements first, so that each tensor is aligned.
_ORDER = (
    "U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E4M3", "F8_E5M2",
    "I8", "U8", "BOOL",
)  # fmt: skip
_OWN_TYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
_NAMES = {np.dtype(_OWN_TYPES.get(name, NUMPY_DTYPES.get(name))): name for name in _ORDER}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A tensor's dtype by the format's name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * BITS[self.dtype] // 8


def write_safetensors(
    path: str | PathLike[str],
    tensors: Mapping[str, npt.NDArray[np.generic]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file atomically, without copying all tensors.

    Args:
        path: The file.
        tensors: Arrays by name, which may be views.
        metadata: The file's metadata; by default {"format": "pt"}, which transformers requires.
    """
    entries = {n: Entry(_NAMES[np.asarray(a).dtype], np.shape(a)) for n, a in tensors.items()}
    ordered = sorted(entries, key=lambda name: (_ORDER.index(entries[name].dtype), name))
    header = _header({name: entries[name] for name in ordered}, metadata or METADATA)
    arrays = (np.ascontiguousarray(tensors[name]).reshape(-1) for name in ordered)
    write_pieces(path, chain([header], (array.view(np.uint8).data for array in arrays)))


def write_stream(
    path: Path, entries: Mapping[str, Entry], data: Callable[[str], npt.NDArray[Any]]
) -> None:
    """Writes a file for transformers, not atomically; ``data`` returns a tensor by name."""
    try:
        with path.open("wb") as file:
            file.write(_header(entries, METADATA))
            for name, entry in entries.items():
                raw = np.ascontiguousarray(data(name)).view(np.uint8).reshape(-1)
                if raw.size != entry.nbytes:
                    raise ValueError(f"{name}: expected {entry.nbytes} bytes, got {raw.size}")
                file.write(raw.data)
    except OSError as err:
        raise CheckpointError(f"{final_name(path)} cannot be written: {reason(err)}") from err


def _header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.nbytes
        offsets = [begin, end]
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
