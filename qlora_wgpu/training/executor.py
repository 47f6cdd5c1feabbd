"""Where micro-batches are computed, on the run's own device or elsewhere, and how fast."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from qlora_wgpu.model.adapter_model import AdapterModel, FloatArray
from qlora_wgpu.model.batch_encoding import IntArray
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.model.steps import LossSums, PreferenceInputs, StepKind
from qlora_wgpu.training.observers import WorkerFigures
from qlora_wgpu.training.preferences import PreferenceBatch

# ---- how fast ------------------------------------------------------------------------------------

_WINDOW = 10  # steps


class ThroughputMeter:
    """Measures over a window of steps: figures of two steps may arrive together."""

    def __init__(self) -> None:
        """Starts stopped at zero."""
        self._marks: deque[tuple[float, int]] = deque(maxlen=_WINDOW + 1)
        self._tokens = 0
        self._paused = 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._paused

    def start(self) -> None:
        """The first step begins."""
        self._marks.append((self._now(), self._tokens))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While it is entered, time does not count."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begin

    def add(self, tokens: int) -> None:
        """A step with this many tokens has ended."""
        self._tokens += tokens
        self._marks.append((self._now(), self._tokens))

    @property
    def tokens_per_second(self) -> float:
        """Over the steps of the window."""
        (t0, n0), (t1, n1) = self._marks[0], self._marks[-1]
        return (n1 - n0) / max(t1 - t0, 1e-9)


# ---- micro-batches, and what computes them -------------------------------------------------------

Arrays = tuple[Any, Any, Any]
Done = Callable[[int], None]
"""Told how many micro-batches are done, before the next."""
_QUEUED_BATCHES = 16


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """A micro-batch of a training step."""

    ids: IntArray  # token ids (batch, seq)
    targets: IntArray  # what each position predicts, (batch, seq)
    mask: IntArray  # 0 for padding, else the number of the sample within its row, (batch, seq)
    dropout_key: int | None  # the key of its dropout masks and noise; None without
    tokens: int  # its tokens, padding not counted
    # Each target's weight in the loss, float32 (batch, seq); None where all are one
    weights: FloatArray | None = None
    samples: PreferenceInputs | None = None  # what an objective over answers knows of them
    # Whether only its answers' divergence from the reference is added up
    is_measured: bool = False

    @classmethod
    def of_answers(
        cls, model: AdapterModel, made: PreferenceBatch, dropout_key: int | None = None
    ) -> MicroBatch:
        """One of answers, checked."""
        batch = made.batch
        return cls(
            *model.checked(batch.input_ids, batch.labels, batch.attention_mask),
            dropout_key=dropout_key,
            tokens=made.tokens,
            samples=made.samples,
            is_measured=made.kind == "divergence",
        )


class MeasuresLoss(Protocol):
    """Base and adapter, wherever they are."""

    def summed_loss(self, batches: Iterable[Arrays]) -> LossSums:
        """The loss summed over all labels of some batches, their number and hits; no gradient.

        Args:
            batches: Token ids, labels and mask, each (batch, seq).
        """


class Executor(MeasuresLoss, Protocol):
    """Adds up what micro-batches give; the sums end on the device of the run's adapter.

    Whoever does it, the sums have the same bits: each micro-batch is one term, in their order.
    """

    def prepare(self, batch: int, seq: int, kind: StepKind = "train") -> None:
        """Makes ready what steps of this shape and kind need."""

    def neutral(self) -> FloatArray:
        """A flat adapter that does nothing."""

    def devices(self) -> list[tuple[str, str]]:
        """Of whatever computes, or has so far: a device's name, and how its kernels are cut."""

    def answer_logps(self, batches: Iterable[MicroBatch], done: Done) -> Iterable[FloatArray]:
        """The summed log probability of each answer of some micro-batches, float32."""

    def answer_sums(self, batches: Iterable[MicroBatch], done: Done) -> FloatArray:
        """Loss and metrics summed over some micro-batches, as ``stats`` has them."""

    def accumulate(self, batches: Iterable[MicroBatch], is_stopped: Callable[[], bool]) -> bool:
        """Adds gradients, losses, label tokens and hits of a step; they may still be on the way."""

    def figures(self) -> tuple[WorkerFigures, ...]:
        """What each worker has done since the last call; none on the run's own device."""


class LocalExecutor:
    """The device of the run's model."""

    def __init__(self, model: QLoRAModel, throughput: ThroughputMeter | None = None) -> None:
        """Has compiled nothing yet."""
        self._model = model
        self._throughput = throughput or ThroughputMeter()
        self._shapes: set[tuple[int, int]] = set()

    def prepare(self, batch: int, seq: int, kind: StepKind = "train") -> None:
        """Compiles and allocates what steps of this shape and kind need."""
        self._model.program(kind, batch, seq)

    def accumulate(self, batches: Iterable[MicroBatch], is_stopped: Callable[[], bool]) -> bool:
        """Queues them, each before the next one is made; does not wait."""
        for batch in batches:
            if batch.is_measured:
                given = batch.ids, batch.targets, batch.mask, batch.samples
                self._model.measure("divergence", *given)
                continue
            self._compile(batch.ids.shape)
            self._model.accumulate(
                batch.ids, batch.targets, batch.mask, dropout_key=batch.dropout_key,
                weights=batch.weights, samples=batch.samples,
            )  # fmt: skip
        return True

    def _compile(self, shape: tuple[int, ...]) -> None:
        """Compiles a shape that is met for the first time, off the clock."""
        rows, length = shape
        if (rows, length) in self._shapes:
            return
        self._shapes.add((rows, length))
        self._model.read_stats()  # waits: time in which the device works does count
        with self._throughput.paused():
            self._model.prepare(rows, length)

    def summed_loss(self, batches: Iterable[Arrays]) -> LossSums:
        """The loss summed over all labels of some batches, their number and hits."""
        return self._model.summed_loss(batches)

    def neutral(self) -> FloatArray:
        """A flat adapter that does nothing."""
        return self._model.neutral

    def devices(self) -> list[tuple[str, str]]:
        """The model's: its name, and how its kernels are cut."""
        device = self._model.device
        return [(device.name, repr(device.profile))]

    def answer_logps(self, batches: Iterable[MicroBatch], done: Done) -> Iterator[FloatArray]:
        """The summed log probability of each answer, a micro-batch at a time."""
        for number, batch in enumerate(batches):
            done(number)
            assert batch.samples is not None
            count = len(batch.samples.references)
            yield self._model.answer_logps(batch.ids, batch.targets, batch.mask, count)

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
                model.measure(kind, batch.ids, batch.targets, batch.mask, batch.samples)
            stats = model.read_stats()
            model.zero_stats()
        return stats

    def figures(self) -> tuple[WorkerFigures, ...]:
        """None: the run's own figures say all."""
        return ()
