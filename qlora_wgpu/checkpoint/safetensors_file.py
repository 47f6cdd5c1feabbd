"""Reading safetensors files tensor by tensor, through a memory map."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import from_bfloat16
from qlora_wgpu.checkpoint.file_signatures import what_it_is
from qlora_wgpu.checkpoint.safetensors_format import FLOATS, NUMPY_DTYPES
from qlora_wgpu.checkpoint.safetensors_header import HeaderError, TensorEntry, read_header
from qlora_wgpu.errors import CheckpointError, brief
from qlora_wgpu.files import open_file
from qlora_wgpu.limits import HEADER_BYTES
from qlora_wgpu.mapped_files import let_go, map_file, require_whole

_PIECE = 1 << 22  # numbers that are read at a time
_MAX_SUGGESTED_FROM = 20_000  # a search for similar names takes seconds beyond that


class SafetensorsFile:
    """An open safetensors file; nothing but its header is read before it is asked for.

    Attributes:
        path: The file.
        metadata: The strings stored beside the tensors.
        on_read: Called with the name of each tensor that is about to be read.
    """

    on_read: Callable[[str], None] | None = None

    def __init__(self, path: str | PathLike[str]) -> None:
        """Opens a file and checks its header.

        Raises:
            CheckpointError: If it is missing, truncated, damaged or something else.
        """
        self.path = Path(path)
        try:
            self._entries, self.metadata, self._data = _open(self.path)
        except HeaderError as err:
            raise CheckpointError(f"{self.path} {err}") from err
        except OSError as err:
            raise CheckpointError(f"{self.path} cannot be read: {err.strerror}") from err

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forgets the map; arrays that ``raw`` gave out keep it alive as long as they need it."""
        self._data = None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """All tensors, in the order of the header."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """A tensor's element type by the format's name, for example "BF16"."""
        return self._entry(name).dtype

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A tensor as a read-only view of the file; bfloat16 as uint16, 8-bit floats as uint8.

        Raises:
            CheckpointError: If there is no such tensor, or NumPy has no such elements or shape.
        """
        entry = self._entry(name)
        if entry.dtype not in NUMPY_DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has dtype {entry.dtype}, which NumPy has not"
            )
        if self.on_read is not None:
            self.on_read(name)
        array = self.stored_bytes(name).view(NUMPY_DTYPES[entry.dtype])
        try:
            return array.reshape(entry.shape)
        except (ValueError, OverflowError) as err:  # of no elements, but with huge dimensions
            raise CheckpointError(
                f"{self.path}: tensor {brief(name)} has shape {brief(entry.shape)}, which NumPy "
                "does not take"
            ) from err

    def stored_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, whatever their type, as a read-only view of the file."""
        entry = self._entry(name)
        if self._data is None:
            raise ValueError(f"{self.path} is closed")
        return self._data[entry.begin : entry.end]

    def float32(self, name: str, part: tuple[int | slice, ...] = ()) -> npt.NDArray[np.float32]:
        """A tensor of floating-point numbers, or a part of it, as a float32 array of its own.

        float64 numbers beyond float32's range become infinite.

        Raises:
            CheckpointError: If there is no such tensor, or its dtype is not F32, F16, BF16 or F64.
        """
        dtype = self.dtype(name)
        if dtype not in FLOATS:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has dtype {dtype}, but weights must be "
                f"{', '.join(FLOATS[:-1])} or {FLOATS[-1]}"
            )
        raw = self.raw(name)[part] if part else self.raw(name)
        floats = np.empty(raw.size, np.float32)
        flat = raw.reshape(-1)
        for begin in range(0, raw.size, _PIECE):
            piece = flat[begin : begin + _PIECE]
            require_whole(piece)
            with np.errstate(over="ignore"):
                floats[begin : begin + _PIECE] = from_bfloat16(piece) if dtype == "BF16" else piece
            let_go(piece)
        return floats.reshape(raw.shape)

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}{nearest(name, self.names())}"
            ) from None


def nearest(name: str, names: list[str]) -> str:
    """The end of a sentence about a missing tensor: empty, or "; nearest is 'y'"."""
    leaf = name.rpartition(".")[2]
    alike = [n for n in names if n.rpartition(".")[2] == leaf] or names
    close = difflib.get_close_matches(name, alike[:_MAX_SUGGESTED_FROM], n=1)
    return f"; nearest is {close[0]!r}" if close else ""


def _open(
    path: Path,
) -> tuple[dict[str, TensorEntry], Mapping[str, str], npt.NDArray[np.uint8] | None]:
    with open_file(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        start = file.read(64)
        if not start:
            raise HeaderError("is empty: download or copy it again")
        if kind := what_it_is(start):
            raise HeaderError(kind)
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
                f"is truncated: its header says it has {length} bytes itself, the file has {size}; "
                "download or copy it again"
            )
        file.seek(8)
        entries, metadata = read_header(path, file.read(length), size - 8 - length)
        if size == 8 + length:  # nothing to map
            return entries, metadata, np.empty(0, np.uint8)
        return entries, metadata, map_file(path, file, 8 + length)
