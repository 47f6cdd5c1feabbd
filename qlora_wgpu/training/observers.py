"""A run's result and events, and the observers that get these and may stop the run."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from qlora_wgpu.errors import CallbackError, QLoRAError, QLoRAWarning
from qlora_wgpu.visible import without_secrets

# ---- results -------------------------------------------------------------------------------------


def as_json(value: Any) -> Any:
    """A value of an event as JSON, without secrets; dataclasses become objects."""
    if is_dataclass(value):
        return {each.name: as_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return without_secrets(str(value)) if isinstance(value, str | Path) else value


@dataclass(frozen=True)
class Sample:
    """A prompt that the model continues before and after training."""

    prompt: str  # the text to continue
    expected: str  # the continuation in the data
    before: str  # the model's continuation before the first step
    after: str = ""  # the model's continuation at the end; empty if the run was interrupted


@dataclass(frozen=True)
class Written:
    """A text that the model has generated."""

    prompt: str  # the text to continue
    expected: str  # the continuation in the data; empty if there is none
    text: str  # the model's continuation


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        steps: Number of optimizer steps done.
        train_loss: Mean loss over the label tokens of the last logged steps, or None.
        eval_loss_before: Held-out loss before the first step, if there is held-out data.
        eval_loss: Held-out loss after the last step, if there is held-out data.
        best_eval_loss: The held-out loss of the best evaluation: the lowest one, unless
            ``eval.metric_for_best_model`` is another metric.
        best_metric: The value of that metric in the best evaluation.
        metric_for_best_model: The name of that metric.
        best_step: The step of the best evaluation.
        num_tokens: Tokens trained on, without padding.
        seconds: Time from the first step to the end.
        interrupted: Whether the user or an observer stopped the run; it can be resumed.
        stopped_early: Whether the run ended because evaluations stopped improving.
        was_finished: Whether a resumed run was already finished, so that nothing was trained.
        run_dir: The run's folder.
        adapter_dir: The folder of the final adapter.
        peak_bytes: Maximum number of bytes allocated on the device.
        stop_reason: The reason given by the observer or callback that stopped the run.
        stop_signal: The number of the signal that stopped it, as with Ctrl-C, SIGTERM or SIGHUP.
        sample: The first of ``samples``; None from a ``Trainer``, which generates none.
        samples: Sample texts before and after training.
        reports: The report and the loss curve that were written; none from a ``Trainer``.
    """

    steps: int
    train_loss: float | None
    eval_loss_before: float | None
    eval_loss: float | None
    best_eval_loss: float | None
    best_step: int | None
    num_tokens: int
    seconds: float
    interrupted: bool
    stopped_early: bool
    run_dir: Path
    adapter_dir: Path
    peak_bytes: int
    was_finished: bool = False
    best_metric: float | None = None
    metric_for_best_model: str = "loss"
    stop_reason: str | None = None
    stop_signal: int | None = None
    sample: Sample | None = None
    samples: tuple[Sample, ...] = ()
    reports: tuple[Path, ...] = ()

    def __repr__(self) -> str:
        steps = f"{self.steps:,} step{'s' * (self.steps != 1)}"
        parts = [steps, f"{self.num_tokens:,} tokens in {self.seconds:,.0f} s"]
        if self.eval_loss is not None:
            before = self.eval_loss_before
            start = "" if before is None else f"{before:.4f} before, "
            parts.append(f"held-out loss {start}{self.eval_loss:.4f} after")
        elif self.train_loss is not None:
            parts.append(f"loss {self.train_loss:.4f}")
        if self.interrupted:
            parts.append(f"stopped: {self.stop_reason or 'interrupted'}")
        return f"{type(self).__name__}({', '.join(parts)}; {self.run_dir})"


# ---- events --------------------------------------------------------------------------------------

Row = dict[str, Any]


@dataclass(frozen=True)
class SourceShare:
    """The part of a mixture's training data that comes from one source."""

    name: str  # the name of the source
    rows: int  # number of its rows per epoch
    of: int  # number of rows that the source has
    tokens: int  # label tokens of its rows per epoch


@dataclass(frozen=True)
class RunSetup:
    """The model and data of a run that is about to start."""

    device: str  # the GPU's name
    base: str  # the base model as named in the configuration
    scheme: str  # how its linear layers are stored
    compute_dtype: str  # type of matmul operands
    rank: int  # the rank of the adapter
    adapted_layers: int  # number of layers with an adapter
    adapter_parameters: int  # number of trained parameters
    batch_size: int  # rows of a micro-batch
    accumulation: int  # micro-batches of a step
    train_rows: int  # number of training examples
    train_tokens: int  # their label tokens
    eval_rows: int | None = None  # number of held-out examples, or None
    eval_tokens: int | None = None  # their label tokens, or None
    sources: tuple[SourceShare, ...] = ()  # the parts of a mixture; empty for other data


@dataclass(frozen=True)
class WorkerMetrics:
    """What a cluster worker has done in some steps."""

    name: str  # the name of the worker
    tokens: int  # tokens of its micro-batches whose result was used, padding included
    timed_tokens: int  # those in micro-batches that were timed; others included compilation
    seconds: float  # the time of these
    answers: bool = True  # whether the worker is responding

    @property
    def tokens_per_second(self) -> float | None:
        """Its throughput while it computes; None if unknown."""
        return self.timed_tokens / self.seconds if self.seconds > 0 else None

    def and_then(self, later: WorkerMetrics) -> WorkerMetrics:
        """The sum with the metrics of later steps."""
        return WorkerMetrics(
            self.name,
            self.tokens + later.tokens,
            self.timed_tokens + later.timed_tokens,
            self.seconds + later.seconds,
            later.answers,
        )


class Observer:
    """Gets the events of a run; override the methods of those that you need.

    The events of ``qlora_wgpu.train``, in their order: ``note``, ``activity``, ``planned``,
    ``planned_on_host``, ``tuned``, ``loading``, ``setup``, those of the trainer (``started`` to
    ``finished``), ``sampled`` and ``reported``. A ``Trainer`` sends only its own; ``warning`` may
    come at any time. Within an event, ``stop_run`` ends the run.
    """

    _reason: str | None = None

    def stop_run(self, reason: str = "an observer stopped it") -> None:
        """Ends the run after the current step and saves its state, like Ctrl-C.

        Args:
            reason: Becomes ``TrainResult.stop_reason``.
        """
        self._reason = reason

    @property
    def stop_reason(self) -> str | None:
        """Why the run should end; None if it should continue."""
        return self._reason

    def forget_stop(self) -> None:
        """Clears the reason before a new run."""
        self._reason = None

    def note(self, text: str) -> None:
        """A note on the settings or the model, before the run starts."""

    def warning(self, text: str) -> None:
        """A warning, which does not end the run."""

    def activity(self, text: str) -> None:
        """An activity other than steps has started, such as reading data; empty when it is over."""

    def planned(self, memory: Counter[str]) -> None:
        """The device memory of training is planned: bytes by kind."""

    def planned_on_host(self, memory: Counter[str], mapped: int) -> None:
        """The host memory of this process is planned: bytes by kind.

        ``mapped`` are bytes of weights offloaded to disk, which need no memory. The memory of a
        software GPU (``planned``) is host memory as well.
        """

    def tuned(self, notes: Sequence[str]) -> None:
        """Kernels were tuned; ``notes`` describe their tiling."""

    def loading(self, name: str, done: int, total: int) -> None:
        """A tensor is about to be loaded, after ``done`` of ``total``."""

    def setup(self, setup: RunSetup) -> None:
        """The model has been loaded onto the device."""

    def started(self, total_steps: int, done: int, memory: Counter[str]) -> None:
        """Steps are about to start or continue; ``memory`` is allocated, bytes by kind."""

    def resumed(self, checkpoint: Path, step: int) -> None:
        """A run resumes after ``step`` steps."""

    def workers(self, workers: Sequence[WorkerMetrics]) -> None:
        """The workers of a cluster have finished a logged step; comes before its row."""

    def step(self, row: Row) -> None:
        """A logged step: its row of metrics.jsonl."""

    def evaluation(self, row: Row) -> None:
        """An evaluation: its row of metrics.jsonl."""

    def written(self, step: int, texts: Sequence[Written]) -> None:
        """Sample texts were generated after a step, with ``eval.sample_steps``."""

    def saved(self, folder: Path) -> None:
        """A checkpoint or the adapter was written."""

    def finished(self, result: TrainResult) -> None:
        """The run has ended and the adapter is written."""

    def sampled(self, sample: Sample) -> None:
        """A sample text was generated: before training, and again with ``after`` filled in."""

    def reported(self, paths: Sequence[Path]) -> None:
        """The report and the loss curve were written."""


_NOT_EVENTS = ("stop_run", "stop_reason", "forget_stop")
EVENTS = tuple(n for n in vars(Observer) if not n.startswith("_") and n not in _NOT_EVENTS)


class Unwatched(Observer):
    """The default observer: warnings become Python warnings, other events are ignored."""

    def warning(self, text: str) -> None:
        """Issues a ``QLoRAWarning``."""
        warnings.warn(text, QLoRAWarning, stacklevel=2)


class EventRows(Observer):
    """Converts every event to a JSON object: ``event``, and its data by name.

    An event with a single row or dataclass is not nested. The final result, which the caller writes
    when everything is complete, replaces ``finished``.
    """

    def __init__(self, write: Callable[[Row], None]) -> None:
        self.write = write

    def finished(self, result: TrainResult) -> None:
        """Writes nothing: the final result has its own object."""


def _row_writer(event: str) -> Callable[..., None]:
    names = list(signature(getattr(Observer, event)).parameters)[1:]

    def write(self: EventRows, *details: Any) -> None:
        values = [as_json(each) for each in details]
        is_single = is_dataclass(details[0]) or names == ["row"]
        self.write(
            {"event": event, **(values[0] if is_single else dict(zip(names, values, strict=True)))}
        )

    return write


for _event in EVENTS:
    if _event not in vars(EventRows):
        setattr(EventRows, _event, _row_writer(_event))


# ---- dispatch ------------------------------------------------------------------------------------


@dataclass
class _Subscriber:
    observer: Observer
    on_error: Literal["stop", "drop"]
    has_failed: bool = False


class Events(Observer):
    """Passes a run's events to all subscribed observers, in order; each run has one.

    An event may come in the middle of a step, so an observer's error does not end the run there: it
    is stored, the observer gets no more events, and the run ends after the step. For an observer
    that may be dropped, such as a service, it is only a warning.
    """

    def __init__(self) -> None:
        self._subscribers: list[_Subscriber] = []
        self._failure: CallbackError | None = None

    @classmethod
    def of(cls, observer: Observer | None) -> Events:
        """The events of a run for an observer, ``Unwatched`` by default."""
        if isinstance(observer, Events):
            return observer
        events = cls()
        events.subscribe(observer or Unwatched())
        return events

    def subscribe(self, observer: Observer, on_error: Literal["stop", "drop"] = "stop") -> None:
        """Passes all further events to an observer, until it fails."""
        self._subscribers.append(_Subscriber(observer, on_error))

    @property
    def stop_reason(self) -> str | None:
        """The first reason of any observer."""
        reasons = (self._reason, *(each.observer.stop_reason for each in self._subscribers))
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def failure(self) -> CallbackError | None:
        """The error of an observer, which ends the run."""
        return self._failure

    def check(self) -> None:
        """Raises the error of an observer that has failed, with its own error as the cause."""
        if self._failure is not None:
            raise self._failure

    def forget_stop(self) -> None:
        """Clears reasons and failures before a new run."""
        super().forget_stop()
        self._failure = None
        for each in self._subscribers:
            each.has_failed = False
            each.observer.forget_stop()

    def close(self) -> None:
        """Closes and unsubscribes the services."""
        for each in self._subscribers:
            if each.on_error == "drop" and hasattr(each.observer, "close"):
                self._call(each, "close", ())
        self._subscribers = [each for each in self._subscribers if each.on_error == "stop"]

    def _call(self, subscriber: _Subscriber, event: str, details: tuple[Any, ...]) -> None:
        if subscriber.has_failed:
            return
        try:
            getattr(subscriber.observer, event)(*details)
        except Exception as err:  # an observer's errors have no common base
            subscriber.has_failed = True
            name = type(subscriber.observer).__name__
            if subscriber.on_error == "drop":
                self.warning(f"{name} is disabled after an error: {err}")
            else:
                if not isinstance(err, CallbackError):
                    err = failure_of(f"{name}.{event}", err)
                self._failure = self._failure or err


def _dispatcher(event: str) -> Callable[..., None]:
    def dispatch(self: Events, *details: Any) -> None:
        for subscriber in self._subscribers:
            self._call(subscriber, event, details)

    return dispatch


for _event in EVENTS:  # so that none can be forgotten
    setattr(Events, _event, _dispatcher(_event))


def failure_of(what: str, err: Exception, when: str = "") -> CallbackError:
    """The error for a user's observer or callback that has failed, with its cause."""
    kind = "" if isinstance(err, QLoRAError) else f"{type(err).__name__}: "
    reason = f"{kind}{err}" if str(err) else type(err).__name__
    failure = CallbackError(f"{what} failed{when}: {reason}")
    failure.__cause__ = err
    return failure
