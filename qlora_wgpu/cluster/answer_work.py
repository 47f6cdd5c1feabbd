"""What an objective over answers has workers compute beside gradients.

A worker keeps nothing of it: what the reference says of a micro-batch's answers, and KTO's
divergence over all of a step's or an evaluation's rows, come with each call. So workers may come
and go here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from typing import Any

from qlora_wgpu.cluster.blocks import FloatArray, Sums
from qlora_wgpu.cluster.running_sums import RunningSums
from qlora_wgpu.model.steps import Samples
from qlora_wgpu.training.computing import Done, MicroBatch

_AT_ONCE = 256  # micro-batches, whose tokens are in memory until they are computed

Arguments = tuple[Any, ...]
Compute = Callable[[str, list[Arguments], Callable[[Sums], None]], bool]
"""Has workers compute blocks by a method of theirs, and takes what they give in their order."""


def said(compute: Compute, batches: Iterable[MicroBatch], done: Done) -> Iterator[FloatArray]:
    """The summed log probability of each answer, a micro-batch at a time."""
    count, given = 0, ((*_tokens(b), len(_samples(b).references)) for b in batches)

    def add(sums: Sums) -> None:
        assert sums.answers is not None
        done(count + len(logps))
        logps.append(sums.answers)

    while some := list(islice(given, _AT_ONCE)):
        logps: list[FloatArray] = []
        compute("answer_logps", some, add)
        count += len(some)
        yield from logps


def summed(compute: Compute, batches: Iterable[MicroBatch], done: Done) -> RunningSums:
    """Loss and metrics of an evaluation; what is measured beforehand comes first."""
    total, count = RunningSums(), 0

    def add(sums: Sums) -> None:
        nonlocal count
        done(count)
        count += 1
        total.add(sums)

    for is_measured, group in groupby(batches, lambda batch: batch.is_measured):
        while some := list(islice(group, _AT_ONCE)):
            if is_measured:
                measure(compute, some, add)
            else:
                given = [(*_tokens(b), _samples(b), total.divergence) for b in some]
                compute("answer_loss", given, add)
    return total


def measure(compute: Compute, batches: list[MicroBatch], add: Callable[[Sums], None]) -> bool:
    """The divergence of some micro-batches' answers from the reference; whether all was done."""
    return compute("divergence", [(*_tokens(b), _samples(b)) for b in batches], add)


def learnt(batch: MicroBatch, divergence: tuple[float, float]) -> Arguments:
    """What goes to a worker of a micro-batch whose gradient is asked for.

    Args:
        batch: Of answers, or of rows that are learnt as they are.
        divergence: Of the step's answers from the reference, and over how many it is summed.
    """
    of_answers = () if batch.samples is None else (batch.samples, divergence)
    return (*_tokens(batch), batch.dropout_key, batch.weights, *of_answers)


def _tokens(batch: MicroBatch) -> Arguments:
    return batch.ids, batch.targets, batch.mask


def _samples(batch: MicroBatch) -> Samples:
    assert batch.samples is not None
    return batch.samples
