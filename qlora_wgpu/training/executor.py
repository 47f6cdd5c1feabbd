"""Executors of micro-batches, on the run's own device or a cluster, and their throughput."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from qlora_wgpu.model.adapter_model import AdapterModel, FloatArray
from qlora_wgpu.model.batch_encoding import IntArray
from qlora_wgpu.model.image_inputs import ImageInputs
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.model.steps import (
    LossSums,
    PreferenceInputs,
    SampleInputs,
    ScoreInputs,
    StepKind,
)
from qlora_wgpu.training.observers import WorkerMetrics
from qlora_wgpu.training.preferences import PreferenceBatch

# ---- throughput ----------------------------------------------------------------------------------

_WINDOW = 10  # steps


class ThroughputMeter:
    """Tokens per second over a window of steps, since the metrics of two may arrive together."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=_WINDOW + 1)
        self._tokens = 0
        self._begin = 0.0
        self._paused = 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._paused

    def start(self) -> None:
        """Marks the start of the first step."""
        self._begin = self._now()
        self._marks.append((self._begin, self._tokens))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While it is entered, time is not counted."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begin

    def add(self, tokens: int) -> None:
        """Marks the end of a step with this many tokens."""
        self._tokens += tokens
        self._marks.append((self._now(), self._tokens))

    @property
    def seconds(self) -> float:
        """The time since the first step, without what was paused."""
        return max(self._now() - self._begin, 1e-9)

    @property
    def tokens_per_second(self) -> float:
        """The throughput over the window."""
        (t0, n0), (t1, n1) = self._marks[0], self._marks[-1]
        return (n1 - n0) / max(t1 - t0, 1e-9)


# ---- executors -----------------------------------------------------------------------------------

Arrays = tuple[Any, Any, Any, ImageInputs | None]
Done = Callable[[int], None]
"""Called with the number of finished micro-batches before each one."""
_QUEUED_BATCHES = 16


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """A micro-batch of a training step."""

    ids: IntArray  # token ids (batch, seq)
    targets: IntArray  # what each position predicts, (batch, seq)
    mask: IntArray  # 0 for padding, otherwise the sample's number within its row, (batch, seq)
    dropout_key: int | None  # the key of its dropout masks and noise, if any
    tokens: int  # its tokens, without padding
    # Each target's weight in the loss, float32 (batch, seq); None if all are one
    weights: FloatArray | None = None
    samples: SampleInputs | None = None  # of objectives over answers, completions, sequences
    images: ImageInputs | None = None  # its images, in a run that has any
    # Whether only the divergence from the reference model is computed
    is_measured: bool = False

    @classmethod
    def of_answers(
        cls, model: AdapterModel, made: PreferenceBatch, dropout_key: int | None = None
    ) -> MicroBatch:
        """A checked micro-batch of answers."""
        batch = made.batch
        return cls(
            *model.checked(batch.input_ids, batch.labels, batch.attention_mask),
            dropout_key=dropout_key,
            tokens=made.tokens,
            samples=made.samples,
            images=made.images,
            is_measured=made.kind == "divergence",
        )


class MeasuresLoss(Protocol):
    """Computes held-out losses of base and adapter."""

    def summed_loss(self, batches: Iterable[Arrays]) -> LossSums:
        """The loss summed over all label tokens of some batches, their number and hits.

        Batches are token ids, labels and mask, each (batch, seq), and images if there are any.
        """


class Executor(MeasuresLoss, Protocol):
    """Computes micro-batches and sums their results on the device of the run's adapter.

    The sums of all executors are bit-identical: each micro-batch is one term, in order.
    """

    def prepare(self, batch: int, seq: int, kind: StepKind = "train") -> None:
        """Compiles and allocates what steps of this shape and kind need."""

    def neutral(self) -> FloatArray:
        """The flat parameters of an adapter that changes nothing."""

    def devices(self) -> list[tuple[str, str]]:
        """The name and kernel profile of each device used so far."""

    def answer_logps(self, batches: Iterable[MicroBatch], done: Done) -> Iterable[FloatArray]:
        """The summed log probability of each answer of some micro-batches, float32."""

    def answer_sums(self, batches: Iterable[MicroBatch], done: Done) -> FloatArray:
        """Loss and metrics summed over some micro-batches, as ``stats`` has them."""

    def scores(
        self, batches: Iterable[MicroBatch], done: Done
    ) -> tuple[FloatArray, list[FloatArray]]:
        """``stats`` summed over micro-batches, and the scores of each (sequences, classes)."""

    def token_logps(
        self, batches: Sequence[MicroBatch], parameters: FloatArray | None = None
    ) -> list[FloatArray]:
        """The log probability of each target of some micro-batches, float32 (batch, seq).

        They are those of the current adapter, or of one with these flat parameters.
        """

    def accumulate(self, batches: Iterable[MicroBatch], is_stopped: Callable[[], bool]) -> bool:
        """Adds up a step's gradients, losses, label tokens and hits; may return before the end."""

    def worker_metrics(self) -> tuple[WorkerMetrics, ...]:
        """What each cluster worker has done since the last call."""


class LocalExecutor:
    """Computes micro-batches on the device of the run's model."""

    def __init__(
        self, model: QLoRAModel, throughput: ThroughputMeter | None = None, *, images: bool = False
    ) -> None:
        """With ``images``, all steps are prepared for some."""
        self._model = model
        self._images = images
        self._throughput = throughput or ThroughputMeter()
        self._shapes: set[tuple[int, int]] = set()

    def prepare(self, batch: int, seq: int, kind: StepKind = "train") -> None:
        """Compiles and allocates what steps of this shape and kind need."""
        self._model.program(kind, batch, seq, images=self._images)

    def accumulate(self, batches: Iterable[MicroBatch], is_stopped: Callable[[], bool]) -> bool:
        """Queues each micro-batch before the next is encoded, without waiting for the device."""
        for batch in batches:
            if batch.is_measured:
                given = batch.ids, batch.targets, batch.mask, batch.samples, batch.images
                self._model.measure("divergence", *given)
                continue
            self._compile(batch.ids.shape)
            self._model.accumulate(
                batch.ids, batch.targets, batch.mask, dropout_key=batch.dropout_key,
                weights=batch.weights, samples=batch.samples, images=batch.images,
            )  # fmt: skip
        return True

    def _compile(self, shape: tuple[int, ...]) -> None:
        """Compiles a new shape; that time is not counted."""
        rows, length = shape
        if (rows, length) in self._shapes:
            return
        self._shapes.add((rows, length))
        self._model.read_stats()  # waits, since the time that the device computes is counted
        with self._throughput.paused():
            self._model.prepare(rows, length, images=self._images)

    def summed_loss(self, batches: Iterable[Arrays]) -> LossSums:
        """The loss summed over all label tokens of some batches, their number and hits."""
        return self._model.summed_loss(batches)

    def neutral(self) -> FloatArray:
        """The flat parameters of an adapter that changes nothing."""
        return self._model.neutral

    def devices(self) -> list[tuple[str, str]]:
        """The name and kernel profile of the model's device."""
        device = self._model.device
        return [(device.name, repr(device.profile))]

    def answer_logps(self, batches: Iterable[MicroBatch], done: Done) -> Iterator[FloatArray]:
        """The summed log probability of each answer, by micro-batch."""
        for number, batch in enumerate(batches):
            done(number)
            assert isinstance(batch.samples, PreferenceInputs)
            count = len(batch.samples.references)
            given = batch.ids, batch.targets, batch.mask, count, batch.images
            yield self._model.answer_logps(*given)

    def scores(
        self, batches: Iterable[MicroBatch], done: Done
    ) -> tuple[FloatArray, list[FloatArray]]:
        """Loss and metrics summed over some micro-batches, as ``stats``, and the scores of each."""
        model, found = self._model, list[FloatArray]()
        with model.device.in_turn:
            model.zero_stats()
            for number, batch in enumerate(batches):
                done(number)
                assert isinstance(batch.samples, ScoreInputs)
                found.append(model.scores(batch.ids, batch.mask, batch.samples))
            stats = model.read_stats()
            model.zero_stats()
        return stats, found

    def token_logps(
        self, batches: Sequence[MicroBatch], parameters: FloatArray | None = None
    ) -> list[FloatArray]:
        """The log probability of each target of some micro-batches, by an adapter."""
        model = self._model
        if parameters is None:
            return [model.token_logps(each.ids, each.targets, each.mask) for each in batches]
        with model.disable_adapter():
            model.write_parameters(parameters)
            return self.token_logps(batches)

    def answer_sums(self, batches: Iterable[MicroBatch], done: Done) -> FloatArray:
        """Loss and metrics summed over some micro-batches, as ``stats`` has them."""
        model = self._model
        with model.device.in_turn:
            model.zero_stats()
            for number, batch in enumerate(batches):
                if number % _QUEUED_BATCHES == _QUEUED_BATCHES - 1:
                    model.read_stats()  # waits, so that the queue stays short
                done(number)
                kind: Literal["loss", "divergence"] = "divergence" if batch.is_measured else "loss"
                given = batch.ids, batch.targets, batch.mask, batch.samples, batch.images
                model.measure(kind, *given)
            stats = model.read_stats()
            model.zero_stats()
        return stats

    def worker_metrics(self) -> tuple[WorkerMetrics, ...]:
        """There are no workers."""
        return ()
