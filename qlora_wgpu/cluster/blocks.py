"""What goes to a worker's actor and comes back: arrays and numbers, held to what is expected."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import ClusterError
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.batch_encoding import shifted_targets
from qlora_wgpu.model.steps import PreferenceInputs
from qlora_wgpu.ops.optimizers import (
    STATS_BALANCE,
    STATS_CORRECT,
    STATS_LENGTH,
    STATS_LOSS,
    STATS_METRICS,
    STATS_TOKENS,
)
from qlora_wgpu.ops.preference import METRICS, Preference

# ---- calls and what comes back -------------------------------------------------------------------

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Asked:
    """What goes to a worker with each block."""

    version: int  # the number of the parameters to compute with
    nonce: int  # a number of its own, which comes back with the answer to this block alone


@dataclass(frozen=True, eq=False)
class BlockResult:
    """What a block gives."""

    loss: float  # summed over its label tokens; a float32
    tokens: float  # its label tokens; a float32
    saturated: int  # values that kernels held at the end of their type
    seconds: float  # what the worker computed for, compiling not counted
    # Flat, summed over its label tokens; None where only the loss was asked for
    gradient: FloatArray | None = None
    correct: float = 0.0  # label tokens whose logit is the largest; a float32
    balance: float = 0.0  # the loss that balances experts, times the label tokens; a float32
    # What an objective over answers sums up beside its loss, in the order of
    # ``ops.preference.METRICS``; of the divergence only what the block itself adds
    metrics: FloatArray | None = None
    # The summed log probability of each of its answers, where that was asked for
    answers: FloatArray | None = None
    nonce: int = 0  # as it was asked

    @property
    def is_finite(self) -> bool:
        """Whether there is no NaN and no infinity in it."""
        if not np.isfinite([self.loss, self.correct, self.balance]).all():
            return False
        for few in (self.metrics, self.answers):
            if few is not None and not np.isfinite(few).all():
                return False
        if self.gradient is None:
            return True
        with np.errstate(all="ignore"):
            square = np.dot(self.gradient, self.gradient)  # fast; it may overflow by itself
        return bool(np.isfinite(square)) or bool(np.isfinite(self.gradient).all())


# ---- sums ----------------------------------------------------------------------------------------

DIVERGENCE = slice(METRICS.index("divergence"), METRICS.index("divergent") + 1)
"""Where metrics have KTO's divergence, and over how many answers it is summed."""
NO_DIVERGENCE = (0.0, 0.0)


class RunningSums:
    """Sums of some blocks, with the bits that one device's would have.

    Attributes:
        stats: float32 (STATS_LENGTH), as a device has them.
        saturated: Values that kernels held at the end of their type.
    """

    def __init__(self) -> None:
        """Nothing is added yet."""
        self.stats = np.zeros(STATS_LENGTH, np.float32)
        self.saturated = 0

    def add(self, sums: BlockResult) -> None:
        """Adds a block's; who calls it keeps to the order of the blocks."""
        own = np.zeros(STATS_LENGTH, np.float32)
        own[STATS_LOSS], own[STATS_TOKENS] = sums.loss, sums.tokens
        own[STATS_CORRECT], own[STATS_BALANCE] = sums.correct, sums.balance
        if sums.metrics is not None:
            own[STATS_METRICS:] = sums.metrics
        self.stats += own
        self.saturated += sums.saturated

    @property
    def divergence(self) -> tuple[float, float]:
        """Of all answers so far from the reference, and over how many that is summed."""
        total, count = self.stats[STATS_METRICS:][DIVERGENCE].tolist()
        return total, count


# ---- what is expected ----------------------------------------------------------------------------

_ROUNDING = 1e-3  # of a sum of weights


class WrongAnswerError(ClusterError):
    """A worker's answer is not one to what it was asked."""


@dataclass(frozen=True)
class Expected:
    """The form of a block's sums."""

    # Its label tokens, or pairs or answers; the sum of its weights, where it has some
    tokens: float
    is_weighted: bool = False  # whether it is such a sum, which a device adds up in another order
    gradient: int | None = None  # length of its gradient; None without one
    has_metrics: bool = False  # whether there are sums of ``METRICS``
    # How many log probabilities there are; None where none were asked for
    answers: int | None = None

    def check(self, asked: Asked, sums: Any) -> BlockResult:
        """The sums, where they are an answer to this block."""
        if not isinstance(sums, BlockResult):
            raise WrongAnswerError(f"it answered with {_kind(sums)} in place of a block's sums")
        if sums.nonce != asked.nonce:
            raise WrongAnswerError("it answered with the sums of another block")
        metrics = len(METRICS) if self.has_metrics else None
        for name, array, length in (
            ("gradient", sums.gradient, self.gradient),
            ("metrics", sums.metrics, metrics),
            ("log probabilities", sums.answers, self.answers),
        ):
            _check_vector(name, array, length)
        for name in ("loss", "tokens", "correct", "balance", "seconds"):
            if not isinstance(getattr(sums, name), Real):
                raise WrongAnswerError(f"its {name} is {_kind(getattr(sums, name))}, not a number")
        saturated: Any = sums.saturated
        if not isinstance(saturated, Integral) or int(saturated) < 0:
            raise WrongAnswerError(f"it counted {saturated!r} saturated values")
        apart = _ROUNDING * self.tokens if self.is_weighted else 0.0
        if not abs(sums.tokens - self.tokens) <= apart:
            raise WrongAnswerError(f"it counted {sums.tokens:g} tokens, not {self.tokens:g}")
        if not (math.isfinite(sums.seconds) and sums.seconds >= 0):
            raise WrongAnswerError(f"it computed for {sums.seconds} seconds, as it says")
        return sums


def expected(
    method: str, given: Sequence[Any], length: int, preference: Preference | None
) -> Expected:
    """What a worker's method gives for a block."""
    _, targets, mask, *more = given
    if method == "loss":
        targets = shifted_targets(np.asarray(targets, np.int64), np.asarray(mask, np.int64))
        return Expected(_labels(targets))
    if method == "answer_logps":
        return Expected(0.0, answers=int(more[0]))
    if method == "divergence":
        return Expected(0.0, has_metrics=True)
    samples = next((each for each in more if isinstance(each, PreferenceInputs)), None)
    gradient = length if method == "gradient" else None
    if samples is not None and preference is not None:
        count = len(samples.references) / (2 if preference.is_paired else 1)
        return Expected(count, gradient=gradient, has_metrics=True)
    weights = more[1]
    count = _labels(targets, weights)
    return Expected(count, weights is not None, gradient, has_metrics=True)


def check_parameters(values: Any, length: int) -> FloatArray:
    """A flat adapter that a worker told."""
    _check_vector("adapter", values, length)
    if not np.isfinite(values).all():
        raise WrongAnswerError("its adapter has values that are not finite")
    checked: FloatArray = values
    return checked


def check_text(ids: Any, most: int, vocab_size: int) -> list[int]:
    """The tokens that a worker wrote."""
    if not isinstance(ids, list) or not all(isinstance(token, Integral) for token in ids):
        raise WrongAnswerError(f"it wrote {_kind(ids)} in place of a list of tokens")
    if len(ids) > most or not all(0 <= token < vocab_size for token in ids):
        raise WrongAnswerError(f"it wrote {len(ids)} tokens of {most}, or some of no vocabulary")
    return [int(token) for token in ids]


def _check_vector(name: str, array: Any, length: int | None) -> None:
    if length is None:
        if array is not None:
            raise WrongAnswerError(f"its answer has {name}, for which nobody asked")
        return
    if type(array) is not np.ndarray:
        raise WrongAnswerError(f"its {name} is {_kind(array)}, not an array")
    if array.dtype != np.float32:
        raise WrongAnswerError(f"its {name} is of {array.dtype}, not float32")
    if array.shape != (length,):
        shape = " × ".join(map(str, array.shape))
        raise WrongAnswerError(f"its {name} has {shape or 'no'} values, not {length}")


def _labels(targets: Any, weights: Any = None) -> float:
    is_label = np.asarray(targets) != IGNORE_INDEX
    return float(is_label.sum() if weights is None else np.asarray(weights)[is_label].sum())


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


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
