"""What of a training fits into a budget: rows, tokens, and the settings that make it fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qlora_wgpu.runs.workload import Totals, Workload

MOST_TOKENS = 65_536  # of a micro-batch; more are not looked for
# In which rows are tried: so far apart that a longer one takes more. Between neighbours that need
# not be so, since products of more rows are cut along their reduction less.
LENGTHS = (
    *range(64, 1024, 64),
    *(
        length
        for first in (1024 << n for n in range(6))
        for length in range(first, 2 * first, first // 16)
    ),
    MOST_TOKENS,
)


@dataclass(frozen=True)
class Fits:
    """The largest batch and sequence that a budget has room for.

    Attributes:
        batch: Most rows at the planned length; 0 for none.
        seq: Most tokens of one row; 0 for none.
    """

    batch: int
    seq: int


def what_fits(totals: Totals, workload: Workload, budget: int) -> Fits:
    """The most rows at the planned length, and the most tokens of one row."""
    rows = range(1, max(MOST_TOKENS // workload.seq, 1) + 1)
    return Fits(
        largest_fitting(lambda n: totals(batch=n), budget, rows),
        largest_fitting(lambda n: totals(batch=1, seq=n), budget, LENGTHS),
    )


def remedy_for(totals: Totals, workload: Workload, budget: int) -> str:
    """The settings that cost least with which a workload fits; empty where none do.

    A smaller micro-batch changes nothing that is learnt and little of the speed, checkpointing
    costs about a third of it, and shorter rows lose what they cut.
    """
    rows = range(1, workload.batch + 1)
    for checkpointing in dict.fromkeys((workload.checkpointing, True)):

        def total(n: int, *, checkpointing: bool = checkpointing) -> int | None:
            return totals(batch=n, checkpointing=checkpointing)

        if batch := largest_fitting(total, budget, rows):
            return _in_keys(workload, batch, workload.seq, checkpointing)
    shorter = [length for length in LENGTHS if length < workload.seq]
    seq = largest_fitting(lambda n: totals(batch=1, seq=n, checkpointing=True), budget, shorter)
    return _in_keys(workload, 1, seq, True) if seq else ""


def _in_keys(workload: Workload, batch: int, seq: int, checkpointing: bool) -> str:
    """What differs from a workload, as it is written behind ``train run.yaml``."""
    keys = []
    batch = max(batch // workload.sides, 1)
    if batch * workload.sides != workload.batch:
        accumulation = -(-workload.batch * workload.accumulation // (batch * workload.sides))
        keys.append(f"train.per_device_train_batch_size={batch}")
        keys.append(f"train.gradient_accumulation_steps={accumulation}")
    if checkpointing != workload.checkpointing:
        keys.append("train.gradient_checkpointing=true")
    if seq != workload.seq:
        keys.append(f"data.max_seq_length={seq}")
    return " ".join(keys)


def largest_fitting(total: Callable[[int], int | None], budget: int, sizes: Sequence[int]) -> int:
    """The largest of some sizes whose total fits, where totals rise with the sizes; 0 for none.

    Totals grow about linearly, so few are made: that of the size that is told, and of the next
    larger one, which does not fit, are among them.

    Args:
        total: Bytes that a size takes; None for too many to count.
        budget: Bytes that there are.
        sizes: Rising.
    """
    low, high, made = -1, len(sizes), dict[int, int]()
    guess = 0
    while high - low > 1:
        taken = total(sizes[guess])
        made[sizes[guess]] = 2 * budget if taken is None else taken
        if taken is not None and taken <= budget:
            low = guess
        else:
            high = guess
        near = [sizes[i] for i in (low, high) if 0 <= i < len(sizes)]
        if len(near) == 1:  # nothing is there on the other side
            near = sorted(made, key=lambda size: abs(made[size] - budget))[:2]
        where = _where({size: made[size] for size in near}, budget)
        guess = min(max(bisect_right(sizes, where) - 1, low + 1), high - 1)
    return sizes[low] if low >= 0 else 0


def _where(made: dict[int, int], budget: int) -> float:
    """About the size that takes a budget, by the line through one or two of known totals."""
    (a, taken), *others = made.items()
    if not others:
        return max(min(8.0 * a, 2048.0), 1.1 * a * budget / taken)
    ((b, other),) = others
    slope = (other - taken) / (b - a)
    return a + (budget - taken) / slope if slope > 0 else 2 * max(a, b)
