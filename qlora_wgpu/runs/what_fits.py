"""What of a training fits into a budget: rows, tokens, and the settings that make it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from qlora_wgpu.runs.workload import Target, Workload

MOST_TOKENS = 65_536  # of a micro-batch; more are not looked for
SEQ_STEP = 64  # in which sequences are tried


@dataclass(frozen=True)
class Fits:
    """The largest batch and sequence that a budget has room for.

    Attributes:
        batch: Most rows at the planned length; 0 for none.
        seq: Most tokens of one row; 0 for none.
    """

    batch: int
    seq: int


def what_fits(here: Target, workload: Workload, budget: int) -> Fits:
    """The most rows at the planned length, and the most tokens of one row."""
    rows = largest_fitting(
        lambda n: here.total(replace(workload, batch=n)),
        budget,
        max(MOST_TOKENS // workload.seq, 1),
    )
    steps = largest_fitting(
        lambda n: here.total(replace(workload, batch=1, seq=n * SEQ_STEP)),
        budget,
        MOST_TOKENS // SEQ_STEP,
    )
    return Fits(rows, steps * SEQ_STEP)


def remedy_for(here: Target, workload: Workload, budget: int) -> str:
    """The settings that cost least with which a workload fits; empty where none do.

    A smaller micro-batch changes nothing that is learnt and little of the speed, checkpointing
    costs about a third of it, and shorter rows lose what they cut.
    """

    def fits(**changes: Any) -> bool:
        total = here.total(replace(workload, **changes))
        return total is not None and total <= budget

    rows = range(workload.batch, 0, -1)
    for checkpointing in dict.fromkeys((workload.checkpointing, True)):
        batch = next((n for n in rows if fits(batch=n, checkpointing=checkpointing)), 0)
        if batch:
            return _in_keys(workload, batch, workload.seq, checkpointing)
    steps = largest_fitting(
        lambda n: here.total(replace(workload, batch=1, seq=n * SEQ_STEP, checkpointing=True)),
        budget,
        workload.seq // SEQ_STEP,
    )
    return _in_keys(workload, 1, steps * SEQ_STEP, True) if steps else ""


def _in_keys(workload: Workload, batch: int, seq: int, checkpointing: bool) -> str:
    """What differs from a workload, as it is written behind ``train run.yaml``."""
    keys = []
    if batch != workload.batch:
        accumulation = -(-workload.batch * workload.accumulation // batch)
        keys.append(f"train.per_device_train_batch_size={batch}")
        keys.append(f"train.gradient_accumulation_steps={accumulation}")
    if checkpointing != workload.checkpointing:
        keys.append("train.gradient_checkpointing=true")
    if seq != workload.seq:
        keys.append(f"data.max_seq_length={seq}")
    return " ".join(keys)


def largest_fitting(total: Callable[[int], int | None], budget: int, most: int) -> int:
    """The largest n up to ``most`` whose total fits; it grows about linearly, so few are made."""
    low, low_total = 0, 0
    high, high_total = most + 1, None
    guess = 1
    while high - low > 1:
        size = total(guess)
        if size is not None and size <= budget:
            # From the second on, the last two tell the slope.
            slope = max((size - low_total) / (guess - low), 1.0) if low else float(size)
            low, low_total = guess, size
        else:
            high, high_total = guess, size
            slope = max(((size or 2 * budget) - low_total) / (guess - low), 1.0)
        step = int((budget - low_total) / slope) if low > 1 or high_total else 1
        guess = min(max(low + step, low + 1), high - 1)
    return low
