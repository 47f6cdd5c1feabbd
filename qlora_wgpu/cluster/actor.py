"""The one actor of a worker's process, and how its answers travel.

An answer goes as bytes and is read by the owner's own code: Dask would lose one that it cannot
read, and whoever waits for it would wait on.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.cluster.blocks import RemoteWorker, Specification
from qlora_wgpu.cluster.expected import WrongAnswerError

Packed = tuple[bytes, list[npt.NDArray[np.uint8]]]
"""A pickle, and the arrays in it, which are not copied."""


@dataclass(frozen=True)
class _Failed:
    """What a worker's method raised."""

    error: Exception


class Actor:
    """Answers for a worker."""

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
    """What an actor's method gave.

    Raises:
        WrongAnswerError: If the answer cannot be read.
        Exception: What the method raised.
    """
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
