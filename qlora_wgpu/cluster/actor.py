"""What a worker's process holds: one Dask actor, and in it the worker that computes."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.cluster.blocks import WrongAnswerError

# ---- a worker ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker is, once it has opened the model."""

    device: str  # its GPU's name
    driver: str  # its driver
    kernels: str  # how its kernels are cut; workers that differ may differ in the last bits
    memory: int  # bytes on its device
    version: str  # the package's
    base: dict[str, str]  # hashes of the base's config.json and weights
    adapter: dict[str, tuple[int, ...]]  # names and shapes of the adapter's tensors
    notes: tuple[str, ...] = ()  # what it has to say


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker opens."""

    settings: dict[str, Any]  # the run's, as plain data
    length: int  # tokens of its longest row
    version: str  # the owner's version of the package
    # All that the run computes, as plain data, from which its memory is planned
    shapes: dict[str, Any]
    gpu: str | None = None  # the worker's GPU; None where it decides itself


WorkerClass = Callable[[WorkerSpec], Any]
"""Opens the model in a worker's process; ``runs.worker.Worker`` has the methods that are called.

Each but ``identity``, ``refused`` and ``write`` gets an ``Asked`` first.
"""


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

    def __init__(self, worker_class: WorkerClass, specification: WorkerSpec) -> None:
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


def made(worker_class: WorkerClass, specification: WorkerSpec) -> bytes:
    """A pickle that makes an actor where it is loaded.

    The scheduler, which looks into tasks, sees bytes: it needs neither this package nor a GPU.
    """

    class Made:
        def __reduce__(self) -> tuple[Any, ...]:
            return Actor, (worker_class, specification)

    return pickle.dumps(Made())
