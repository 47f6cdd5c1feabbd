"""Order of examples, packing and padded batches: pure functions of their arguments."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import overload

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data.examples import Example
from qlora_wgpu.errors import ShapeError
from qlora_wgpu.labels import IGNORE_INDEX

# ---- packing -------------------------------------------------------------------------------------


class PackedRows(Sequence[tuple[int, ...]]):
    """The examples of each packed row, in two flat arrays: there may be many millions."""

    def __init__(self, members: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        self.members = members  # indices of all rows' examples, row after row
        self.ends = ends  # the end of each row in ``members``

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> PackedRows:
        """Flattens lists of examples, at least one."""
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return cls(np.fromiter(chain.from_iterable(rows), np.int64, int(ends[-1])), ends)

    @classmethod
    def one_each(cls, count: int) -> PackedRows:
        """Rows of a single example each."""
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
        """Sums a value per example over each row."""
        total = np.cumsum(values[self.members], dtype=np.int64)
        return np.diff(total[self.ends - 1], prepend=0)


def pack(lengths: npt.NDArray[np.int64], limit: int) -> list[tuple[int, ...]]:
    """Packs examples into rows of at most ``limit`` tokens, by best-fit decreasing."""
    order = np.argsort(-lengths, kind="stable")
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # free tokens of each row, ascending
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


# ---- batches -------------------------------------------------------------------------------------

SMALLEST_BUCKET = 32


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Padded examples; every array has the shape (batch, length)."""

    input_ids: npt.NDArray[np.int32]  # padded on the right
    labels: npt.NDArray[np.int32]  # not shifted; -100 where no loss is taken and in the padding
    attention_mask: npt.NDArray[np.int32]  # 0 for padding, else the segment in the row, from 1
    weights: npt.NDArray[np.float32]  # each token's weight in the loss; 0 in the padding


def epoch_order(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order in which an epoch visits ``n`` examples: a permutation of ``range(n)``.

    Philox is counter-based: the order follows from (seed, epoch) alone, so a resumed run needs no
    replay. Its raw bits are sorted here, because only those are stable across NumPy versions.
    """
    if n < 0 or seed < 0 or epoch < 0:
        raise ShapeError(f"n, seed and epoch must be at least 0, got {n}, {seed} and {epoch}")
    bits = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(n)
    return np.argsort(bits, kind="stable").astype(np.int64)


def collate(rows: Sequence[Sequence[Example]], pad_token_id: int, length: int) -> Batch:
    """Pads rows on the right into one batch."""
    if not rows:
        raise ShapeError("a batch must have at least one row")
    longest = max(row_length(row) for row in rows)
    if longest > length:
        raise ShapeError(f"a row of {longest} tokens does not fit into a batch of length {length}")
    shape = (len(rows), length)
    input_ids = np.full(shape, pad_token_id, dtype=np.int32)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int32)
    attention_mask = np.zeros(shape, dtype=np.int32)
    weights = np.zeros(shape, dtype=np.float32)
    for number, row in enumerate(rows):
        first = 0
        for segment, example in enumerate(row, start=1):
            end = first + len(example)
            input_ids[number, first:end] = example.input_ids
            labels[number, first:end] = example.labels
            attention_mask[number, first:end] = segment
            weights[number, first:end] = example.weight
            first = end
    return Batch(input_ids, labels, attention_mask, weights)


def row_length(row: Sequence[Example]) -> int:
    """Number of tokens in a row's examples."""
    return sum(map(len, row))


def bucket_length(longest: int, max_seq_length: int) -> int:
    """Rounds a batch's length up to 32, 48, 64, 96, 128, ... or ``max_seq_length``.

    Few lengths mean few traced graphs; steps of at most 1.5 limit the padding to a third.
    """
    if longest > max_seq_length:
        raise ShapeError(f"{longest} tokens exceed max_seq_length={max_seq_length}")
    bucket = SMALLEST_BUCKET
    while bucket < longest:
        half_more = bucket + bucket // 2
        bucket = half_more if half_more >= longest else 2 * bucket
    return min(bucket, max_seq_length)
