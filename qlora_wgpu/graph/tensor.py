"""Symbolic tensors: a shape, an element type, and where the bytes will be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ITEM_SIZE = {"float32": 4, "bfloat16": 2, "uint32": 4, "int32": 4, "uint8": 1}
ROW_UNIT = 8  # rows of matrices are padded with zeros to a multiple of this many elements
TEXEL = 16  # bytes


def padded(columns: int) -> int:
    """The number of elements that a row of ``columns`` elements takes."""
    return -(-columns // ROW_UNIT) * ROW_UNIT


@dataclass(eq=False)
class Storage:
    """Bytes that outlive a step: weights, the adapter, optimizer state, a batch's inputs.

    Attributes:
        label: For messages.
        kind: What they are counted as in the memory plan.
        nbytes: Their number.
        data: What they are filled with at allocation, if anything.
        image: Whether they are kept as an image of texels, which software adapters read faster.
        buffer: The device's buffer or image, once allocated.
    """

    label: str
    kind: str
    nbytes: int
    data: npt.NDArray[Any] | None = None
    image: bool = False
    buffer: Any = None


@dataclass(eq=False)
class Tensor:
    """A matrix, or a vector (``rows`` 1, not padded), of a graph.

    Attributes:
        name: For messages and plans.
        rows: Number of rows.
        columns: Elements of a row that count.
        dtype: Element type.
        stride: Elements from one row to the next; those past ``columns`` are zero.
        storage: Where the bytes live, or None if the plan finds them a slot.
        offset: First byte within ``storage``.
        requires_grad: Whether an adapter's parameter led to it.
        image: Whether it lies in an image; its rows follow each other there as in a buffer.
    """

    name: str
    rows: int
    columns: int
    dtype: str
    stride: int
    storage: Storage | None = None
    offset: int = 0
    requires_grad: bool = False
    image: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes, padding included."""
        return self.rows * self.stride * ITEM_SIZE[self.dtype]

    def units(self, elements: int) -> int:
        """The stride, counted in units of so many elements."""
        return self.stride // elements

    @property
    def texel0(self) -> int:
        """The first texel within an image."""
        return self.offset // TEXEL

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
    image = storage is not None and storage.image
    return Tensor(name, rows, columns, dtype, padded(columns), storage, offset, image=image)


def vector(
    name: str, length: int, dtype: str, storage: Storage | None = None, offset: int = 0
) -> Tensor:
    """A vector without padding."""
    image = storage is not None and storage.image
    return Tensor(name, 1, length, dtype, length, storage, offset, image=image)


def row_blocks(tensor: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """Yields ``(first row, view of up to count rows)`` of a matrix that has a storage.

    Args:
        tensor: The matrix.
        count: A multiple of 256, so that every view may be bound.
    """
    for first in range(0, tensor.rows, count):
        offset = tensor.offset + first * tensor.stride * ITEM_SIZE[tensor.dtype]
        rows = min(count, tensor.rows - first)
        yield (
            first,
            matrix(tensor.name, rows, tensor.columns, tensor.dtype, tensor.storage, offset),
        )


def pad_rows(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Pads the last axis of an array with zeros as a device matrix is padded."""
    extra = -array.shape[-1] % ROW_UNIT
    if not extra:
        return np.ascontiguousarray(array)
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, extra)])


def to_bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds float32 to bfloat16 (nearest, ties to even), as its 16 bits."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return rounded.astype(np.uint16)


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Widens bfloat16 bits to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
