"""Which rows form which micro-batch: a function of (seed, step), so there is no state to resume."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import Config
from qlora_wgpu.data import Batch, Dataset, Example, bucket_length, collate, epoch_order
from qlora_wgpu.data.batches import PackedRows, pack
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.limits import STEPS


@dataclass(frozen=True, eq=False)
class BatchSampler:
    """The division of a data set into optimizer steps."""

    # The examples of each row: one, several if packed, or the two of a pair
    rows: PackedRows
    lengths: npt.NDArray[np.int64]  # tokens of each row; of a pair, those of the longer answer
    batch_size: int  # rows of a micro-batch
    accumulation: int  # micro-batches of a step
    seed: int  # seed of the order
    grouped: bool  # whether each micro-batch of a step has rows of similar length
    steps_per_epoch: int  # optimizer steps per epoch; the last may be shorter
    total_steps: int  # optimizer steps of the run
    _orders: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict, repr=False)
    sides: int = 1  # rows of a micro-batch for each of ``rows``

    @classmethod
    def of(cls, lengths: npt.NDArray[np.int64], config: Config) -> BatchSampler:
        """Counts steps as Hugging Face's Trainer does; ``max_steps`` overrides the epochs.

        The two answers of a pair stay together: in one row with packing, otherwise in two
        consecutive rows.
        """
        train, data = config.train, config.data
        rows = _rows(lengths, config)
        sizes = rows.sums(lengths)
        sides = config.rows_at_once // train.per_device_train_batch_size
        if data.packing:
            packed = pack(sizes, max(data.max_seq_length, int(sizes.max())))
            if len(rows) < len(lengths):
                packed = [tuple(i for number in row for i in rows[number]) for row in packed]
            rows = PackedRows.of(packed)
            sizes = rows.sums(lengths)
        elif sides > 1:
            sizes = lengths.reshape(-1, 2).max(axis=1)
        batches = math.ceil(len(rows) / train.per_device_train_batch_size)
        per_epoch = math.ceil(batches / train.gradient_accumulation_steps)
        total = train.num_train_epochs * per_epoch
        if train.max_steps < 0 and total > STEPS:
            raise ConfigError(
                f"train.num_train_epochs = {train.num_train_epochs:g} makes {total:.3g} steps, "
                f"more than {STEPS:,}: lower it, or set train.max_steps"
            )
        return cls(
            rows=rows,
            lengths=sizes,
            batch_size=config.rows_at_once,
            accumulation=train.gradient_accumulation_steps,
            seed=train.seed,
            grouped=data.group_by_length and not data.packing,
            steps_per_epoch=per_epoch,
            total_steps=train.max_steps if train.max_steps > 0 else math.ceil(total),
            sides=sides,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.lengths.max())

    def blocks(self, step: int) -> list[list[tuple[int, ...]]]:
        """The rows of each micro-batch of a step, as example indices; steps count from 0."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order = self._order(epoch)
        size = self.batch_size // self.sides
        first = within * self.accumulation * size
        chosen = order[first : first + self.accumulation * size]
        if self.grouped:
            # Only within a step, so that batch sizes do not change which rows a step has.
            chosen = chosen[np.argsort(-self.lengths[chosen], kind="stable")]
        groups = (chosen[first : first + size] for first in range(0, len(chosen), size))
        if self.sides == 1:
            return [[self.rows[i] for i in group] for group in groups]
        return [[(i,) for pair in group for i in self.rows[pair]] for group in groups]

    def examples_until(self, step: int) -> tuple[int, npt.NDArray[np.int64]]:
        """The complete epochs of the first steps, and the examples of an incomplete one."""
        epochs, within = divmod(step, self.steps_per_epoch)
        rows = self._order(epochs)[: within * self.accumulation * self.batch_size // self.sides]
        counts = np.diff(self.rows.ends, prepend=0)[rows]
        begins = self.rows.ends[rows] - counts
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return epochs, self.rows.members[np.repeat(begins, counts) + inside]

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The order of an epoch's rows; the latest is cached."""
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = epoch_order(len(self.rows), self.seed, epoch)
        return self._orders[epoch]

    def dropout_key(self, step: int, block: int) -> int:
        """The 32-bit key of a micro-batch's dropout masks."""
        return zlib.crc32(np.array([self.seed, step, block], np.uint64).tobytes())


def _rows(lengths: npt.NDArray[np.int64], config: Config) -> PackedRows:
    """The examples of each row before packing."""
    if config.train.has_pairs:
        return PackedRows(np.arange(len(lengths)), np.arange(2, len(lengths) + 1, 2))
    if config.train.objective == "kto":
        present = np.flatnonzero(lengths)
        return PackedRows(present, np.arange(1, len(present) + 1))
    return PackedRows.one_each(len(lengths))


def weight_unit(examples: Iterable[Example]) -> float:
    """A power of two that scales the largest weight of a step's examples into [1, 2).

    A step's gradient is divided by the sum of its weights, so a common factor cancels, but its
    square could overflow float32. Powers of two are exact.
    """
    largest = max((e.weight for e in examples if e.num_label_tokens), default=0.0)
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest > 0 else 1.0


def padded_batch(rows: Sequence[Sequence[Example]], batch_size: int, max_length: int) -> Batch:
    """Collates rows into a batch of fixed size and of one of a few lengths.

    Missing rows in the last batch of an epoch become padding, which has no labels, so no other
    shape has to be compiled.
    """
    length = bucket_length(max(sum(map(len, row)) for row in rows), max_length)
    return collate([*rows, *[[]] * (batch_size - len(rows))], 0, length)


def sorted_by_length(rows: Sequence[Example], batch_size: int) -> Iterator[list[list[Example]]]:
    """Batches of all examples, the longest first, so that those of a batch have similar lengths."""
    known = rows.lengths if isinstance(rows, Dataset) else np.array([len(row) for row in rows])
    order = np.argsort(-known, kind="stable").tolist()
    for first in range(0, len(order), batch_size):
        yield [[rows[i]] for i in order[first : first + batch_size]]
