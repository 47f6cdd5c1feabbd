"""The weights of a GGUF file by Hugging Face's names, read as those of a safetensors file are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import from_bfloat16
from qlora_wgpu.checkpoint.gguf.element_types import FLOATS, QUANTIZED, ElementType
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.names import Placement
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
        """What a tensor is stored as."""
        return self._file.tensor(self._placements[name].stored).place.type

    def dtype(self, name: str) -> str:
        """A tensor's element type by llama.cpp's name, for example "Q4_K"."""
        return self.type(name).name

    def stored_bytes(self, name: str) -> _Bytes:
        """A tensor's bytes as a view of the file, its rows in the file's order."""
        return self._stored_rows(name).reshape(-1)

    def rows(self, name: str) -> _Bytes:
        """(rows, bytes of a row): a tensor's bytes, its rows in Hugging Face's order.

        A view of the file where that is the file's order, too.
        """
        self._tell(name)
        rows, order = self._stored_rows(name), self._order(name)
        return rows if order is None else rows[order]

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A tensor of floating-point numbers as stored, bfloat16 as uint16.

        Raises:
            CheckpointError: If it is another one.
        """
        kind = self.type(name)
        if self._placements[name].offset and kind.name == "F32":
            return self.float32(name)
        if kind.name not in _NUMPY or self._placements[name].offset:
            raise CheckpointError(f"{self.path}: {name} is not stored as floats")
        rows = np.ascontiguousarray(self.rows(name))
        return rows.view(_NUMPY[kind.name]).reshape(self.shape(name))

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32 numbers, quantized ones as llama.cpp reads them.

        Raises:
            CheckpointError: If it has no such elements.
        """
        kind, placement = self.type(name), self._placements[name]
        if kind.number not in FLOATS and kind.number not in QUANTIZED:
            raise CheckpointError(
                f"{self.path}: {placement.stored} is stored as {kind.name}, which is not read as "
                "weights: take the model in another quantization"
            )
        self._tell(name)
        rows, order = self._stored_rows(name), self._order(name)
        columns = rows.shape[1] // kind.nbytes * kind.block
        result = np.empty((len(rows), columns), np.float32)
        step = max(_AT_ONCE // columns, 1)
        with np.errstate(all="ignore"):  # whoever reads looks for what is not finite
            for first in range(0, len(rows), step):
                part = slice(first, first + step)
                some = rows[part] if order is None else rows[order[part]]
                result[part] = to_float32(some, kind)
            if placement.offset:
                result -= np.float32(placement.offset)
        return result.reshape(placement.shape)

    def _tell(self, name: str) -> None:
        if self._read_last is not None:  # one at a time in memory
            self._file.tensor(self._placements[self._read_last].stored).release()
        self._read_last = name
        if self.on_read is not None:
            self.on_read(name)

    def _stored_rows(self, name: str) -> _Bytes:
        parts = [self._part_rows(name, part) for part, _ in self._placements[name].parts]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _part_rows(self, name: str, placement: Placement) -> _Bytes:
        stored = self._file.tensor(placement.stored)
        if placement.heads and len(placement.shape) == 1:  # a bias: an element of each row
            return stored.data.reshape(len(stored.data) // self.type(name).nbytes, -1)
        count = math.prod(placement.shape[:-1])
        return stored.rows[placement.first_row : placement.first_row + count]

    def _order(self, name: str) -> npt.NDArray[np.int64] | None:
        """Which stored row each row is: llama.cpp stores the two of a pair as neighbours."""
        placement = self._placements[name]
        if not placement.heads:
            return None
        heads, rows = placement.heads, placement.shape[0]
        stored = np.arange(rows).reshape(heads, rows // heads // 2, 2)
        return np.ascontiguousarray(stored.swapaxes(1, 2)).reshape(-1)


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
