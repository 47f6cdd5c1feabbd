"""The weights of a GGUF file by Hugging Face's names, read as those of a safetensors file are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import from_bfloat16
from qlora_wgpu.checkpoint.gguf.element_types import FLOATS, QUANTIZED, ElementType
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.placement import Placement
from qlora_wgpu.errors import CheckpointError

_AT_ONCE = 1 << 22  # elements that become floats at once
_NUMPY = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}
_Bytes = npt.NDArray[np.uint8]


class GGUFWeights:
    """What ``SafetensorsFile`` is for a safetensors file.

    Attributes:
        path: The file, or the first of its parts.
        on_read: Called with the name of each tensor that is about to be read.
    """

    on_read: Callable[[str], None] | None = None

    def __init__(self, file: GGUFFile, placements: Mapping[str, Placement]) -> None:
        """Takes an open file.

        Args:
            file: The file.
            placements: Where each tensor lies in it.
        """
        self.path: Path = file.path
        self._file = file
        self._placements = placements
        self._read_last: str | None = None

    def __contains__(self, name: object) -> bool:
        return name in self._placements

    def names(self) -> list[str]:
        """All tensors."""
        return list(self._placements)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions, whatever it is stored as."""
        return self._placements[name].shape

    def type(self, name: str) -> ElementType:
        """What a tensor is stored as; of one that is made of several floats' float32."""
        placement = self._placements[name]
        kinds = [self._kind(leaf) for leaf in placement.leaves]
        packed = [kind for kind in kinds if not kind.is_float]
        return packed[0] if packed else FLOATS[0] if placement.change else kinds[0]

    def keeps_bits(self, name: str) -> bool:
        """Whether the file's bytes are a tensor's, in whatever order."""
        placement = self._placements[name]
        columns = placement.columns
        is_whole = columns is None or columns.width % self.type(name).block == 0
        return placement.change is None and is_whole

    def dtype(self, name: str) -> str:
        """A tensor's element type by llama.cpp's name, for example "Q4_K"."""
        return self.type(name).name

    def stored_bytes(self, name: str) -> _Bytes:
        """A tensor's bytes as a view of the file, its rows in the file's order."""
        stored = [self._rows_of(leaf).reshape(-1) for leaf in self._placements[name].leaves]
        return stored[0] if len(stored) == 1 else np.concatenate(stored)

    def rows(self, name: str) -> _Bytes:
        """(rows, bytes of a row): a tensor's bytes, its rows in Hugging Face's order.

        A view of the file where that is the file's order, too.
        """
        self._tell(name)
        placement = self._placements[name]
        stored = [self._rows_of(leaf) for leaf in placement.leaves]
        rows, order = _joined(stored), placement.row_order
        rows = rows if order is None else rows[order]
        if placement.columns is None:
            return rows
        kind, width = self.type(name), placement.columns.width
        return placement.columns.of(rows, width // kind.block * kind.nbytes)

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A tensor of floating-point numbers as stored, bfloat16 as uint16.

        Raises:
            CheckpointError: If it is another one.
        """
        kind, placement = self.type(name), self._placements[name]
        is_made = bool(placement.offset) or placement.change is not None
        if is_made and kind.name == "F32":
            return self.float32(name)
        if kind.name not in _NUMPY or is_made:
            raise CheckpointError(f"{self.path}: {name} is not stored as floats")
        rows = np.ascontiguousarray(self.rows(name))
        return rows.view(_NUMPY[kind.name]).reshape(self.shape(name))

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32 numbers, quantized ones as llama.cpp reads them.

        Raises:
            CheckpointError: If it has no such elements.
        """
        placement = self._placements[name]
        self._tell(name)
        if placement.change is None:
            return self._floats(placement)
        sources = [self._floats(source) for source in placement.leaves]
        with np.errstate(all="ignore"):  # as below
            made = placement.change.make(sources)
        return np.ascontiguousarray(made, np.float32).reshape(placement.shape)

    def _floats(self, placement: Placement) -> npt.NDArray[np.float32]:
        parts = []
        for leaf in placement.leaves:
            kind = self._kind(leaf)
            if kind.number not in FLOATS and kind.number not in QUANTIZED:
                raise CheckpointError(
                    f"{self.path}: {leaf.stored} is stored as {kind.name}, which is not read as "
                    "weights: take the model in another quantization"
                )
            parts.append((self._rows_of(leaf), kind))
        order, first = placement.row_order, 0
        columns = parts[0][0].shape[1] // parts[0][1].nbytes * parts[0][1].block
        result = np.empty((sum(len(rows) for rows, _ in parts), columns), np.float32)
        with np.errstate(all="ignore"):  # whoever reads looks for what is not finite
            for rows, kind in parts:
                for some in _cut(rows, columns):
                    result[first : first + len(some)] = to_float32(some, kind)
                    first += len(some)
            if order is not None:
                result = result[order]
            if placement.columns is not None:
                result = placement.columns.of(result, placement.columns.width)
            if placement.offset:
                result -= np.float32(placement.offset)
        return result.reshape(placement.shape)

    def _tell(self, name: str) -> None:
        if self._read_last is not None:  # one at a time in memory
            for leaf in self._placements[self._read_last].leaves:
                self._file.tensor(leaf.stored).release()
        self._read_last = name
        if self.on_read is not None:
            self.on_read(name)

    def _kind(self, placement: Placement) -> ElementType:
        return self._file.tensor(placement.stored).place.type

    def _rows_of(self, placement: Placement) -> _Bytes:
        stored = self._file.tensor(placement.stored)
        if placement.row_order is not None and len(placement.shape) == 1:
            # A bias, whose order is of elements.
            return stored.data.reshape(len(stored.data) // self._kind(placement).nbytes, -1)
        count = math.prod(placement.shape[:-1])
        return stored.rows[placement.first_row : placement.first_row + count]


def _joined(parts: list[_Bytes]) -> _Bytes:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _cut(rows: _Bytes, columns: int) -> Iterator[_Bytes]:
    """Some rows at a time."""
    step = max(_AT_ONCE // columns, 1)
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


def to_float32(rows: _Bytes, kind: ElementType) -> npt.NDArray[np.float32]:
    """Rows of a type's blocks as float32 numbers (rows, columns)."""
    rows = np.ascontiguousarray(rows)
    if kind.name == "BF16":
        return from_bfloat16(rows.view("<u2"))
    if kind.is_float:
        return rows.view(_NUMPY[kind.name]).astype(np.float32)
    import gguf  # takes its time, for those alone who need it

    floats: npt.NDArray[np.float32] = gguf.quants.dequantize(
        rows, gguf.GGMLQuantizationType(kind.number)
    )
    return floats
