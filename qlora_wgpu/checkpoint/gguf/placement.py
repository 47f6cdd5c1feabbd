"""Where a tensor by Hugging Face's name lies in a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", bound="np.generic[Any]")
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Change:
    """How a tensor is made of floats that a file has in its place, where no order of them is it.

    Attributes:
        sources: What the file has.
        make: Makes the tensor of these, each by its placement's shape.
        undo: What the file would have for a tensor, in the order of ``sources``.
    """

    sources: tuple[Placement, ...]
    make: Callable[[Sequence[FloatArray]], FloatArray]
    undo: Callable[[FloatArray], Sequence[FloatArray]]


@dataclass(frozen=True)
class Columns:
    """The order of groups of columns.

    Attributes:
        width: Columns of a group.
        order: Which of the file's groups each is.
    """

    width: int
    order: IntArray

    def of(self, rows: npt.NDArray[Number], width: int) -> npt.NDArray[Number]:
        """Rows (n, groups · width) of elements, or of bytes, in this order."""
        groups = rows.reshape(len(rows), -1, width)
        return groups[:, self.order].reshape(rows.shape)


@dataclass(frozen=True)
class Placement:
    """A tensor, or some rows of one.

    Attributes:
        stored: The name of the file's tensor.
        shape: The dimensions of what is meant here.
        first_row: The first of its rows among those of the file's.
        heads: As many heads' rows are stored for a rotation of neighbours; 0 for none.
        offset: What was added to the weights.
        then: What has the rows that follow, of the same type; ``shape`` has them, too.
        order: Which stored row each is, those of ``then`` counted on; None where they are in order.
        columns: The order of columns, if it is another.
        change: What it is made of, if the file has no rows of it; of the rest ``shape`` alone
            counts then.
    """

    stored: str
    shape: tuple[int, ...]
    first_row: int = 0
    heads: int = 0
    offset: float = 0.0
    then: Placement | None = None
    order: IntArray | None = field(default=None, compare=False)
    columns: Columns | None = field(default=None, compare=False)
    change: Change | None = field(default=None, compare=False)

    @property
    def parts(self) -> Iterator[tuple[Placement, slice]]:
        """The parts, and which rows are theirs."""
        if self.then is None:
            yield self, slice(None)
            return
        rows = self.shape[0] - self.then.shape[0]
        yield replace(self, shape=(rows, *self.shape[1:]), then=None), slice(0, rows)
        yield self.then, slice(rows, None)

    @property
    def row_order(self) -> IntArray | None:
        """Which stored row each row is: llama.cpp stores the two of a pair as neighbours."""
        if not self.heads:
            return self.order
        rows = self.shape[0]
        stored = np.arange(rows).reshape(self.heads, rows // self.heads // 2, 2)
        return np.ascontiguousarray(stored.swapaxes(1, 2)).reshape(-1)

    @property
    def leaves(self) -> tuple[Placement, ...]:
        """What the file has of it, one after the other."""
        if self.change is not None:
            return self.change.sources
        return tuple(part for part, _ in self.parts)

    def as_stored(self, array: FloatArray) -> list[FloatArray]:
        """A tensor as the file has it, in parts as ``leaves`` are.

        Args:
            array: The tensor, of ``shape``.
        """
        if self.change is not None:
            made = self.change.undo(array)
            return [p.as_stored(a)[0] for p, a in zip(self.change.sources, made, strict=True)]
        if self.offset:
            array = array + np.float32(self.offset)
        if self.columns is not None:
            back = replace(self.columns, order=np.argsort(self.columns.order))
            array = back.of(array, self.columns.width)
        if self.row_order is not None:
            array = np.ascontiguousarray(array[np.argsort(self.row_order)])
        return [array[rows] for _, rows in self.parts]
