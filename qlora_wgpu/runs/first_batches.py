"""Epochs, batches, packing and checkpointing of a first run, from its rows and what fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from qlora_wgpu.data import bucket_length
from qlora_wgpu.data.packing import pack

EXAMPLES_OF_A_STEP = 16  # neither noisy nor slow to begin with
_LEAST_STEPS = 100  # of a run; fewer teach little, however large they are
_EPOCHS = ((5000, 1), (2000, 2), (300, 3), (100, 5), (0, 10))  # by the least number of examples
_PACKED_LENGTH = 512  # that short examples share; attention costs more in longer rows
_BUSY = {True: 1024, False: 16_384}  # tokens of a micro-batch, past which none is faster: is_cpu
_ENOUGH = 1024  # tokens of a micro-batch that are worth more than a longer one, checkpointed

Fits = Callable[[int, int, bool], bool]
"""Whether so many rows of so many tokens fit, checkpointed or not."""


@dataclass(frozen=True)
class FirstBatches:
    """How a first run cuts its data.

    Attributes:
        epochs: Passes over the data.
        packing: Whether examples share rows.
        length: Tokens of a row.
        examples_per_row: About how many examples share one.
        rows: Rows of a micro-batch.
        micro_batches: Micro-batches of a step.
        checkpointing: Whether layers are recomputed in the backward pass.
        steps: Steps of the run.
        has_room: Whether even the smallest micro-batch fits.
    """

    epochs: int
    packing: bool
    length: int
    examples_per_row: float
    rows: int
    micro_batches: int
    checkpointing: bool
    steps: int
    has_room: bool


def first_batches(
    lengths: Sequence[int], length: int, limit: int, fits: Fits, *, is_cpu: bool, packable: bool,
    is_bounded: bool = False,
) -> FirstBatches:  # fmt: skip
    """Chooses them.

    Args:
        lengths: Tokens of each example.
        length: That nearly all examples fit in.
        limit: The most tokens of a row.
        fits: What fits into the device's memory.
        is_cpu: Whether the device is a software GPU.
        packable: Whether examples may share rows.
        is_bounded: Whether training knows the device's memory, and so keeps of layers that do not
            all fit as many as do.
    """
    epochs = next(epochs for least, epochs in _EPOCHS if len(lengths) >= least)
    examples = examples_of_a_step(len(lengths) * epochs)
    packed = packed_length(lengths, length, limit, examples) if packable else None
    cut = np.minimum(np.array(lengths, np.int64), packed or length)
    num_rows = len(pack(cut, packed)) if packed else len(lengths)
    per_row = len(lengths) / num_rows
    rows_of_a_step = max(1, round(examples / per_row))
    longest = packed or bucket_length(int(cut.max()), length)
    rows, checkpointing, has_room = _micro_batch(
        rows_of_a_step, longest, fits, _BUSY[is_cpu], is_bounded=is_bounded
    )
    return FirstBatches(
        epochs=epochs,
        packing=packed is not None,
        length=packed or length,
        examples_per_row=per_row,
        rows=rows,
        micro_batches=rows_of_a_step // rows,
        checkpointing=checkpointing,
        steps=epochs * -(-num_rows // rows_of_a_step),
        has_room=has_room,
    )


def examples_of_a_step(seen: int) -> int:
    """Sixteen, or fewer where a run would have too few steps: a power of two.

    Args:
        seen: Examples that the run will see, one of several epochs each time.
    """
    examples = EXAMPLES_OF_A_STEP
    while examples > 1 and seen < _LEAST_STEPS * examples:
        examples //= 2
    return examples


def packed_length(lengths: Sequence[int], length: int, limit: int, examples: int) -> int | None:
    """Tokens of rows that short examples share; None where too few would.

    Args:
        lengths: Tokens of each example.
        length: That nearly all examples fit in.
        limit: The most tokens of a row.
        examples: Of a step, which a row must not have more of.
    """
    mean = sum(lengths) / len(lengths)
    room = min(limit, max(length, _PACKED_LENGTH), int(mean * examples))
    while length < room and 2 * length <= room:
        length *= 2
    return length if length <= room and length >= 2 * mean else None


def _micro_batch(
    rows: int, length: int, fits: Fits, busy: int, *, is_bounded: bool
) -> tuple[int, bool, bool]:
    """Rows of a micro-batch, whether it is checkpointed, and whether it fits at all."""
    divisors = [n for n in range(rows, 0, -1) if rows % n == 0]
    sizes = [n for n in divisors if n * length <= busy] or [1]
    enough = min(sizes[0] * length, _ENOUGH)
    plain = next((n for n in sizes if fits(n, length, False)), 0)
    if plain * length >= enough:
        return plain, False, True
    if is_bounded:  # what more rows would take, layers have that are not computed twice
        least = min(n for n in sizes if n * length >= enough)
        sizes = [n for n in sizes if n <= least]
    checkpointed = next((n for n in sizes if fits(n, length, True)), 0)
    if plain >= checkpointed and plain:
        return plain, False, True
    return max(checkpointed, 1), True, checkpointed > 0
