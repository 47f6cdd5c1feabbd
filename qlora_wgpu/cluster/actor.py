"""The one actor of a worker's process, and what objectives over answers have workers compute."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.cluster.blocks import (
    FloatArray,
    RemoteWorker,
    RunningSums,
    Specification,
    Sums,
    WrongAnswerError,
)
from qlora_wgpu.model.steps import PreferenceInputs
from qlora_wgpu.training.executor import Done, MicroBatch

# ---- objectives over answers ---------------------------------------------------------------------

# A worker keeps nothing of them: what the reference says of a micro-batch's answers, and KTO's
# divergence over all of a step's or an evaluation's rows, come with each call. So workers may come
# and go here as well.

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
    """What goes to a worker of a micro-batch whose gradient is asked for."""
    of_answers = () if batch.samples is None else (batch.samples, divergence)
    return (*_tokens(batch), batch.dropout_key, batch.weights, *of_answers)


def _tokens(batch: MicroBatch) -> Arguments:
    return batch.ids, batch.targets, batch.mask


def _samples(batch: MicroBatch) -> PreferenceInputs:
    assert batch.samples is not None
    return batch.samples


# ---- the actor -----------------------------------------------------------------------------------

Packed = tuple[bytes, list[npt.NDArray[np.uint8]]]
"""A pickle, and the arrays in it, which are not copied."""


@dataclass(frozen=True)
class _Failed:
    """What a worker's method raised."""

    error: Exception


class Actor:
    """Calls a worker's methods for the owner.

    What they give goes as bytes and is read by the owner's own code: Dask would lose what it cannot
    read, and whoever waits for it would wait on.
    """

    def __init__(self, worker_class: type[RemoteWorker], specification: Specification) -> None:
        """Makes the worker, which opens the model."""
        self._worker = worker_class(specification)

    def answer(self, method: str, *arguments: Any) -> Packed:
        """What a method of the worker gives or raises."""
        try:
            return _packed(getattr(self._worker, method)(*arguments))
        except Exception as err:
            return _packed(_Failed(err))


def _packed(value: Any) -> Packed:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return head, [np.asarray(buffer.raw()) for buffer in buffers]


def unpacked(answer: Any) -> Any:
    """What an actor's method gave."""
    try:
        head, buffers = answer
        value = pickle.loads(head, buffers=buffers)
    except Exception as err:  # whatever a pickle does
        why = " ".join(f"{type(err).__name__}: {err}".split())
        raise WrongAnswerError(f"its answer cannot be read: {why}") from err
    if isinstance(value, _Failed):
        if not isinstance(value.error, Exception):
            raise WrongAnswerError("its answer cannot be read: it failed with no error")
        raise value.error
    return value


def made(worker_class: type[RemoteWorker], specification: Specification) -> bytes:
    """A pickle that makes an actor where it is loaded.

    The scheduler, which looks into tasks, sees bytes: it needs neither this package nor a GPU.
    """

    class Made:
        def __reduce__(self) -> tuple[Any, ...]:
            return Actor, (worker_class, specification)

    return pickle.dumps(Made())
