"""Symbolic tensors: shape, element type and storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bfloat16 import from_bfloat16, to_bfloat16

if TYPE_CHECKING:
    from qlora_wgpu.graph.offload import WeightGroup

ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "uint32": 4, "int32": 4, "uint8": 1}
ROW_UNIT = 8  # rows of matrices are padded with zeros to a multiple of this many elements
LARGEST_FLOAT16 = 65_504.0
TEXEL = 16  # bytes
WINDOW = 256  # alignment of windows of a buffer, in bytes

# ---- numbers and sizes -----------------------------------------------------------------------


def stored_bits(array: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Numbers in a tensor's floating-point type, rounded to nearest even."""
    if dtype == "float32":
        return array
    if dtype == "bfloat16":
        return to_bfloat16(array)
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(np.float16).view(np.uint16)


def stored_floats(raw: memoryview | bytes, dtype: str) -> npt.NDArray[np.float32]:
    """The inverse of ``stored_bits``."""
    if dtype == "bfloat16":
        return from_bfloat16(np.frombuffer(raw, np.uint16))
    if dtype == "float16":
        return np.frombuffer(raw, np.float16).astype(np.float32)
    return np.frombuffer(raw, np.float32)


def padded(columns: int) -> int:
    """The padded length of a row of ``columns`` elements."""
    return round_up(columns, ROW_UNIT)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(number: int, unit: int) -> int:
    return ceil_div(number, unit) * unit


def pad_rows(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Pads the last axis of an array with zeros, as in matrices on the device."""
    extra = -array.shape[-1] % ROW_UNIT
    if not extra:
        return np.ascontiguousarray(array)
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, extra)])


# ---- storages and tensors --------------------------------------------------------------------


@dataclass(eq=False)
class Storage:
    """Bytes that outlive a step: weights, the adapter, optimizer state, a batch's inputs."""

    label: str  # for messages
    kind: str  # its kind in the memory plan
    nbytes: int
    data: npt.NDArray[Any] | None = None  # its contents at allocation, if any
    texture: bool = False  # whether it is a texture, which software GPUs read faster
    buffer: Any = None  # the device's buffer or texture, once allocated
    # The group that it is streamed with, or the larger storage that it is a part of; in both cases
    # it has no buffer of its own.
    group: WeightGroup | None = None
    within: Storage | None = None
    first_byte: int = 0  # its offset within the group or the larger storage
    on_host: npt.NDArray[Any] | None = None  # the bytes, if they are only in host memory
    parts: list[Storage] = field(default_factory=list)  # its parts, until allocation

    def part(self, label: str, nbytes: int) -> Storage:
        """Appends a new aligned storage; only before allocation."""
        part = Storage(label, self.kind, nbytes, within=self, first_byte=self.nbytes)
        self.nbytes += -(-nbytes // WINDOW) * WINDOW
        self.parts.append(part)
        return part

    @property
    def whole(self) -> Storage:
        """The storage with the buffer: this one, or the one that it is a part of."""
        return self if self.within is None else self.within


@dataclass(eq=False)
class Tensor:
    """A matrix, or a vector, which is one row without padding."""

    name: str  # for messages and plans
    rows: int
    columns: int  # elements of a row, padding not counted
    dtype: str
    stride: int  # elements from one row to the next; those beyond ``columns`` are zero
    storage: Storage | None = None  # None for an intermediate: the plan assigns a slot
    offset: int = 0  # first byte within ``storage``
    requires_grad: bool = False  # whether it depends on a trained parameter
    # Whether it is in a texture, row after row as in a buffer. For intermediates the layout pass
    # decides.
    texture: bool = False

    @property
    def nbytes(self) -> int:
        return self.rows * self.stride * ITEM_SIZE[self.dtype]

    def units(self, elements: int) -> int:
        """The stride in units of ``elements`` elements."""
        return self.stride // elements

    @property
    def first_texel(self) -> int:
        """Its offset within a texture."""
        return self.offset // TEXEL

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def __repr__(self) -> str:
        return f"{self.name}({self.rows}x{self.columns} {self.dtype})"


def matrix(
    name: str,
    rows: int,
    columns: int,
    dtype: str,
    storage: Storage | None = None,
    offset: int = 0,
) -> Tensor:
    """A matrix whose rows are padded to ``ROW_UNIT`` elements."""
    texture = storage is not None and storage.texture
    return Tensor(name, rows, columns, dtype, padded(columns), storage, offset, texture=texture)


def vector(
    name: str, length: int, dtype: str, storage: Storage | None = None, offset: int = 0
) -> Tensor:
    texture = storage is not None and storage.texture
    return Tensor(name, 1, length, dtype, length, storage, offset, texture=texture)


def row(
    name: str, length: int, dtype: str, storage: Storage | None = None, offset: int = 0
) -> Tensor:
    """A vector padded like a row of a matrix."""
    return matrix(name, 1, length, dtype, storage, offset)


def rows_from(tensor: Tensor, first: int, count: int) -> Tensor:
    """A view of some rows of a matrix that has a storage."""
    offset = tensor.offset + first * tensor.stride * ITEM_SIZE[tensor.dtype]
    return matrix(tensor.name, count, tensor.columns, tensor.dtype, tensor.storage, offset)


def row_blocks(tensor: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """Yields ``(first row, view of up to count rows)`` of a matrix that has a storage."""
    for first in range(0, tensor.rows, count):
        yield first, rows_from(tensor, first, min(count, tensor.rows - first))
