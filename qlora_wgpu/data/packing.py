"""Packing: several examples in one row of a batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import chain
from typing import overload

import numpy as np
import numpy.typing as npt


class PackedRows(Sequence[tuple[int, ...]]):
    """The examples of each row, in two flat arrays: there may be many millions.

    Attributes:
        members: Numbers of all rows' examples, row after row.
        ends: Where each row's end.
    """

    def __init__(self, members: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        """Takes both."""
        self.members = members
        self.ends = ends

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> PackedRows:
        """Takes the examples of each row, at least one."""
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return cls(np.fromiter(chain.from_iterable(rows), np.int64, int(ends[-1])), ends)

    @classmethod
    def one_each(cls, count: int) -> PackedRows:
        """Rows of one example."""
        numbers = np.arange(count, dtype=np.int64)
        return cls(numbers, numbers + 1)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[int, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, ...] | list[tuple[int, ...]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        number = index % len(self)
        first = int(self.ends[number - 1]) if number else 0
        return tuple(self.members[first : int(self.ends[number])].tolist())

    def sums(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The sum of a value of each example, by rows."""
        total = np.cumsum(values[self.members], dtype=np.int64)
        return np.diff(total[self.ends - 1], prepend=0)


def pack(lengths: npt.NDArray[np.int64], limit: int) -> list[tuple[int, ...]]:
    """Puts examples into as few rows of ``limit`` tokens as best-fit decreasing finds.

    Args:
        lengths: Tokens of each example, at most ``limit``.
        limit: Tokens of a row.

    Returns:
        The examples of each row, each once, rows and their examples in the order of the data set.
    """
    order = np.argsort(-lengths, kind="stable")
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left of each row, ascending
    for index in order.tolist():
        length = int(lengths[index])
        at = bisect_left(room, (length, -1))
        if at == len(room):
            left, row = limit, len(rows)
            rows.append([])
        else:
            left, row = room.pop(at)
        rows[row].append(index)
        insort(room, (left - length, row))
    return sorted(tuple(sorted(row)) for row in rows)
