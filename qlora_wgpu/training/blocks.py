"""Which rows make which micro-batch: a function of (seed, step) alone, with no state to resume."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import TrainConfig
from qlora_wgpu.data import Batch, Example, bucket_length, collate, epoch_order

_EMPTY = Example(np.zeros(0, np.int32), np.zeros(0, np.int32))


@dataclass(frozen=True)
class Schedule:
    """How a data set is cut into optimizer steps.

    Attributes:
        rows: Rows of the data set.
        steps_per_epoch: Optimizer steps of a pass over it; the last may be short.
        total_steps: Optimizer steps of the run.
    """

    rows: int
    batch_size: int
    accumulation: int
    seed: int
    steps_per_epoch: int
    total_steps: int

    @classmethod
    def of(cls, rows: int, train: TrainConfig) -> Schedule:
        """Counts steps as Hugging Face's Trainer does; ``max_steps`` overrides the epochs."""
        batches = math.ceil(rows / train.per_device_train_batch_size)
        per_epoch = math.ceil(batches / train.gradient_accumulation_steps)
        total = math.ceil(train.num_train_epochs * per_epoch)
        return cls(
            rows=rows,
            batch_size=train.per_device_train_batch_size,
            accumulation=train.gradient_accumulation_steps,
            seed=train.seed,
            steps_per_epoch=per_epoch,
            total_steps=train.max_steps if train.max_steps > 0 else total,
        )

    def blocks(self, step: int) -> list[npt.NDArray[np.intp]]:
        """The row numbers of each micro-batch of a step, counted from 0."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order = epoch_order(self.rows, self.seed, epoch)
        first = within * self.accumulation * self.batch_size
        chosen = order[first : first + self.accumulation * self.batch_size]
        return [chosen[i : i + self.batch_size] for i in range(0, len(chosen), self.batch_size)]

    def dropout_key(self, step: int, block: int) -> int:
        """The key of a micro-batch's dropout masks, 32 bits."""
        return zlib.crc32(np.array([self.seed, step, block], np.uint64).tobytes())


def padded_batch(rows: Sequence[Example], batch_size: int, max_length: int) -> Batch:
    """Collates rows into a batch of fixed size and of one of few lengths.

    Rows that are missing from the last batch of an epoch become padding, which has no label and
    no weight, so that no shape of its own has to be compiled.
    """
    length = bucket_length(max(map(len, rows)), max_length)
    return collate([*rows, *[_EMPTY] * (batch_size - len(rows))], 0, length)


def in_order(rows: Sequence[Example], batch_size: int) -> Iterator[list[Example]]:
    """Consecutive rows, a batch at a time."""
    for first in range(0, len(rows), batch_size):
        yield [rows[i] for i in range(first, min(first + batch_size, len(rows)))]
