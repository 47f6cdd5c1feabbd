"""What the owner sends to workers, what they return, and how it is validated."""

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
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.batch_encoding import shifted_targets
from qlora_wgpu.model.steps import PolicyInputs, PreferenceInputs, ScoreInputs
from qlora_wgpu.ops.loss import Objective
from qlora_wgpu.ops.optimizers import (
    STATS_BALANCE,
    STATS_CORRECT,
    STATS_LENGTH,
    STATS_LOSS,
    STATS_METRICS,
    STATS_TOKENS,
)
from qlora_wgpu.ops.preference import METRICS
from qlora_wgpu.training.executor import MicroBatch

# ---- requests and results ------------------------------------------------------------------------

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class BlockRequest:
    """Sent to a worker with each block."""

    version: int  # of the parameters to compute with
    nonce: int  # random; the result must contain it


@dataclass(frozen=True, eq=False)
class Samples:
    """Prompts to complete: the same tokens on any worker."""

    prompts: Sequence[Sequence[int]]  # token ids of each completion's prompt
    seeds: Sequence[int]  # of each completion
    sampling: Sampling
    max_completion_length: int
    stop_ids: frozenset[int]


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """The completions of a block's prompts."""

    ids: IntArray  # int32, the tokens of one completion after another, with those that end them
    lengths: IntArray  # int32, tokens of each
    nonce: int  # as sent


@dataclass(frozen=True, eq=False)
class BlockResult:
    """The result of a block."""

    loss: float  # summed over its label tokens; a float32
    tokens: float  # its label tokens; a float32
    saturated: int  # values that kernels clamped to the range of their type
    seconds: float  # of computing, without compiling
    # Flat, summed over its label tokens; None if only the loss was requested
    gradient: FloatArray | None = None
    correct: float = 0.0  # label tokens that are predicted correctly; a float32
    balance: float = 0.0  # router balancing loss times the label tokens; a float32
    # Those of the objective, in their order; KTO's divergence is the block's share
    metrics: FloatArray | None = None
    # Log probabilities, if requested: summed by answer, or of each token
    logps: FloatArray | None = None
    scores: FloatArray | None = None  # of each sequence, flat, if requested
    nonce: int = 0  # as sent

    @property
    def is_finite(self) -> bool:
        """Whether it contains neither NaN nor infinity."""
        if not np.isfinite([self.loss, self.correct, self.balance]).all():
            return False
        for few in (self.metrics, self.logps, self.scores):
            if few is not None and not np.isfinite(few).all():
                return False
        if self.gradient is None:
            return True
        with np.errstate(all="ignore"):
            square = np.dot(self.gradient, self.gradient)  # fast, but may overflow
        return bool(np.isfinite(square)) or bool(np.isfinite(self.gradient).all())


# ---- sums ----------------------------------------------------------------------------------------

DIVERGENCE = slice(METRICS.index("divergence"), METRICS.index("divergent") + 1)
"""The sum of KTO's divergence among the metrics, and the number of answers in it."""
NO_DIVERGENCE = (0.0, 0.0)


class RunningSums:
    """Sums over blocks, bit-identical to those of a single device.

    Attributes:
        stats: float32 (STATS_LENGTH), laid out as on a device.
        saturated: Values that kernels clamped to the range of their type.
    """

    def __init__(self) -> None:
        self.stats = np.zeros(STATS_LENGTH, np.float32)
        self.saturated = 0

    def add(self, sums: BlockResult) -> None:
        """Adds a block's sums; must be called in the order of the blocks."""
        own = np.zeros(STATS_LENGTH, np.float32)
        own[STATS_LOSS], own[STATS_TOKENS] = sums.loss, sums.tokens
        own[STATS_CORRECT], own[STATS_BALANCE] = sums.correct, sums.balance
        if sums.metrics is not None:
            own[STATS_METRICS:] = sums.metrics
        self.stats = self.stats + own
        self.saturated += sums.saturated

    @property
    def divergence(self) -> tuple[float, float]:
        """The summed divergence from the reference so far, and its number of answers."""
        total, count = self.stats[STATS_METRICS:][DIVERGENCE].tolist()
        return total, count


# ---- validation ----------------------------------------------------------------------------------

_ROUNDING = 1e-3  # relative, of a sum of weights


class WrongAnswerError(ClusterError):
    """A worker returned something that is not a result of its block."""


@dataclass(frozen=True)
class Expected:
    """The form of a block's result."""

    # Number of label tokens, pairs or answers; or the sum of their weights
    tokens: float
    is_weighted: bool = False  # a sum of weights, which a device rounds differently
    gradient: int | None = None  # length of the gradient, if there is one
    has_metrics: bool = False  # sums of ``METRICS``
    logps: int | None = None  # number of log probabilities, if there are any
    scores: int | None = None  # number of scores, if there are any

    def check(self, request: BlockRequest, sums: Any) -> BlockResult:
        """Returns the result if it has this form, else raises ``WrongAnswerError``."""
        if not isinstance(sums, BlockResult):
            raise WrongAnswerError(f"it returned {_kind(sums)} instead of a block's result")
        if sums.nonce != request.nonce:
            raise WrongAnswerError("it returned the result of another block")
        metrics = len(METRICS) if self.has_metrics else None
        for name, array, length in (
            ("gradient", sums.gradient, self.gradient),
            ("metrics", sums.metrics, metrics),
            ("log probabilities", sums.logps, self.logps),
            ("scores", sums.scores, self.scores),
        ):
            _check_vector(name, array, length)
        for name in ("loss", "tokens", "correct", "balance", "seconds"):
            if not isinstance(getattr(sums, name), Real):
                raise WrongAnswerError(
                    f"its {name} is {_kind(getattr(sums, name))}, expected a number"
                )
        saturated: Any = sums.saturated
        if not isinstance(saturated, Integral) or int(saturated) < 0:
            raise WrongAnswerError(f"its number of saturated values is invalid: {saturated!r}")
        apart = _ROUNDING * self.tokens if self.is_weighted else 0.0
        if not abs(sums.tokens - self.tokens) <= apart:
            raise WrongAnswerError(f"it counted {sums.tokens:g} tokens, expected {self.tokens:g}")
        if not (math.isfinite(sums.seconds) and sums.seconds >= 0):
            raise WrongAnswerError(f"it reported {sums.seconds} seconds of computing")
        return sums


def expected(method: str, batch: MicroBatch, length: int, objective: Objective) -> Expected:
    """The form of the result of a worker's method, with an adapter of this length."""
    if method == "answer_logps":
        return Expected(0.0, logps=len(answers_of(batch).references))
    if method == "token_logps":
        return Expected(0.0, logps=batch.ids.size)
    if method == "divergence":
        return Expected(0.0, has_metrics=True)
    gradient = length if method == "gradient" else None
    if isinstance(batch.samples, PolicyInputs):
        return Expected(float(batch.samples.shares.sum()), True, gradient, has_metrics=True)
    if isinstance(batch.samples, ScoreInputs):
        assert objective.scoring is not None
        given, targets = objective.scoring, batch.samples.targets
        scores = len(targets) * given.classes if method == "scores" else None
        is_weighted = bool(given.class_weights)
        return Expected(given.divisor(targets), is_weighted, gradient, True, scores=scores)
    if batch.samples is not None and (preference := objective.preference) is not None:
        count = len(answers_of(batch).references) / (2 if preference.is_paired else 1)
        return Expected(count, gradient=gradient, has_metrics=True)
    weights = batch.weights
    count = _labels(batch.targets, weights)
    return Expected(count, weights is not None, gradient, has_metrics=True)


def expected_loss(labels: Any, mask: Any) -> Expected:
    """The form of the result of a worker's ``loss``, whose labels are not shifted."""
    targets = shifted_targets(np.asarray(labels, np.int64), np.asarray(mask, np.int64))
    return Expected(_labels(targets))


def answers_of(batch: MicroBatch) -> PreferenceInputs:
    """The answers of a micro-batch of a preference objective."""
    assert isinstance(batch.samples, PreferenceInputs)
    return batch.samples


def check_parameters(values: Any, length: int) -> FloatArray:
    """Validates a flat adapter from a worker."""
    _check_vector("adapter", values, length)
    if not np.isfinite(values).all():
        raise WrongAnswerError("its adapter contains NaN or infinity")
    checked: FloatArray = values
    return checked


def check_text(ids: Any, max_new_tokens: int, vocab_size: int) -> list[int]:
    """Validates tokens that a worker generated."""
    if not isinstance(ids, list) or not all(isinstance(token, Integral) for token in ids):
        raise WrongAnswerError(f"it generated {_kind(ids)} instead of a list of tokens")
    if len(ids) > max_new_tokens or not all(0 <= token < vocab_size for token in ids):
        raise WrongAnswerError(
            f"it generated {len(ids)} tokens (maximum: {max_new_tokens}), or invalid token ids"
        )
    return [int(token) for token in ids]


def check_completions(
    request: BlockRequest, sampled: Any, given: Samples, vocab_size: int
) -> list[list[int]]:
    """Validates the completions of a block's prompts; returns the tokens of each."""
    if not isinstance(sampled, SampledTokens):
        raise WrongAnswerError(f"it returned {_kind(sampled)} instead of completions")
    if sampled.nonce != request.nonce:
        raise WrongAnswerError("it returned the completions of another block")
    count, most = len(given.seeds), given.max_completion_length
    _check_array("list of lengths", sampled.lengths, np.int32, count)
    if not ((sampled.lengths >= 1) & (sampled.lengths <= most)).all():
        raise WrongAnswerError(f"it returned completions that do not have 1 to {most} tokens")
    _check_array("list of tokens", sampled.ids, np.int32, int(sampled.lengths.sum()))
    if not ((sampled.ids >= 0) & (sampled.ids < vocab_size)).all():
        raise WrongAnswerError("its completions contain invalid token ids")
    parts = np.split(sampled.ids, np.cumsum(sampled.lengths)[:-1])
    completions: list[list[int]] = [part.tolist() for part in parts]
    for ids in completions:
        if not given.stop_ids.isdisjoint(ids[:-1]):
            raise WrongAnswerError("it returned a completion with tokens after its end")
        if len(ids) < most and ids[-1] not in given.stop_ids:
            raise WrongAnswerError("it returned a completion without an end")
    return completions


def _check_vector(name: str, array: Any, length: int | None) -> None:
    if length is not None:
        _check_array(name, array, np.float32, length)
    elif array is not None:
        raise WrongAnswerError(f"its result has {name}, expected none")


def _check_array(name: str, array: Any, dtype: npt.DTypeLike, length: int) -> None:
    if type(array) is not np.ndarray:
        raise WrongAnswerError(f"its {name} is {_kind(array)}, expected an array")
    if array.dtype != dtype:
        raise WrongAnswerError(f"its {name} is {array.dtype}, expected {np.dtype(dtype)}")
    if array.shape != (length,):
        shape = " × ".join(map(str, array.shape))
        raise WrongAnswerError(f"its {name} has {shape or 'no'} values, expected {length}")


def _labels(targets: Any, weights: Any = None) -> float:
    is_label = np.asarray(targets) != IGNORE_INDEX
    return float(is_label.sum() if weights is None else np.asarray(weights)[is_label].sum())


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


# ---- a worker ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerInfo:
    """A worker that has opened the model."""

    device: str  # name of the GPU
    driver: str
    kernels: str  # tiling of the kernels; with other ones, results may differ in the last bits
    memory: int  # bytes on its device
    version: str  # of the package
    base: dict[str, str]  # hashes of the base's config.json and weights
    adapter: dict[str, tuple[int, ...]]  # names and shapes of the adapter's tensors
    notes: tuple[str, ...] = ()  # to be shown to the user


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker opens."""

    settings: dict[str, Any]  # the run's, as plain data
    length: int  # tokens of the longest row
    version: str  # the owner's version of the package
    # What the run computes, as plain data: memory is planned from it
    shapes: dict[str, Any]
    gpu: str | None = None  # None if the worker chooses
    rollouts: dict[str, Any] | None = None  # its generation of completions, the same way
    images: bool = False  # whether its rows have images


WorkerClass = Callable[[WorkerSpec], Any]
"""Opens the model in a worker's process; ``runs.cluster.Worker`` has its methods.

The first argument of each, except ``identity``, ``refused`` and ``write``, is a ``BlockRequest``.
"""


# ---- the actor -----------------------------------------------------------------------------------

Packed = tuple[bytes, list[npt.NDArray[np.uint8]]]
"""A pickle and its arrays, which are not copied."""


@dataclass(frozen=True)
class _Failed:
    """An exception of a worker's method."""

    error: Exception


class Actor:
    """Calls a worker's methods for the owner.

    Results are sent as bytes and unpickled by the owner: Dask drops what it cannot unpickle, and
    the caller would wait forever.
    """

    def __init__(self, worker_class: WorkerClass, specification: WorkerSpec) -> None:
        self._worker = worker_class(specification)

    def answer(self, method: str, *arguments: Any) -> Packed:
        """Calls a method; packs its result or exception."""
        try:
            return _packed(getattr(self._worker, method)(*arguments))
        except Exception as err:
            return _packed(_Failed(err))


def _packed(value: Any) -> Packed:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return head, [np.asarray(buffer.raw()) for buffer in buffers]


def unpacked(answer: Any) -> Any:
    """Unpacks what ``Actor.answer`` returned, and raises what the worker raised."""
    try:
        head, buffers = answer
        value = pickle.loads(head, buffers=buffers)
    except Exception as err:  # unpickling may raise anything
        why = " ".join(f"{type(err).__name__}: {err}".split())
        raise WrongAnswerError(f"cannot read its answer: {why}") from err
    if isinstance(value, _Failed):
        if not isinstance(value.error, Exception):
            raise WrongAnswerError("cannot read its answer: it failed without an error")
        raise value.error
    return value


def pickled_actor(worker_class: WorkerClass, specification: WorkerSpec) -> bytes:
    """A pickle that creates an actor when it is loaded.

    Dask's scheduler inspects tasks; it sees bytes, so it needs neither this package nor a GPU.
    """

    class Created:
        def __reduce__(self) -> tuple[Any, ...]:
            return Actor, (worker_class, specification)

    return pickle.dumps(Created())
