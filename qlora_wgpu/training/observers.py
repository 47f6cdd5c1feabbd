"""The events of a run: who watches it is told of them, and may stop it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from qlora_wgpu.errors import CallbackError, QLoRAError, QLoRAWarning
from qlora_wgpu.training.result import Sample, TrainResult, Written, as_json

# ---- events --------------------------------------------------------------------------------------

Row = dict[str, Any]


@dataclass(frozen=True)
class SourceFigures:
    """What one of several sources gives to the training data.

    Attributes:
        name: The source's.
        rows: Examples that it gives an epoch.
        of: Examples that it has.
        tokens: Tokens of those that it gives which are learnt.
    """

    name: str
    rows: int
    of: int
    tokens: int


@dataclass(frozen=True)
class RunSetup:
    """The model and data that are about to be trained.

    Attributes:
        device: The GPU's name.
        base: The base model as the configuration names it.
        scheme: How its linear layers are stored.
        compute_dtype: Type of matmul operands.
        rank: The adapter's.
        adapted_layers: Layers that carry it.
        adapter_parameters: Numbers that are trained.
        batch_size: Rows of a micro-batch.
        accumulation: Micro-batches of a step.
        train_rows: Examples to learn from.
        train_tokens: Tokens of theirs that are learnt.
        eval_rows: Held-out examples; None without.
        eval_tokens: Tokens of theirs that are measured.
        sources: What each of several sources gives; none without a mixture.
    """

    device: str
    base: str
    scheme: str
    compute_dtype: str
    rank: int
    adapted_layers: int
    adapter_parameters: int
    batch_size: int
    accumulation: int
    train_rows: int
    train_tokens: int
    eval_rows: int | None = None
    eval_tokens: int | None = None
    sources: tuple[SourceFigures, ...] = ()


@dataclass(frozen=True)
class WorkerFigures:
    """What a worker of a cluster has done in some steps.

    Attributes:
        name: The worker's.
        tokens: Of the micro-batches that counted, padding included: another worker's result may
            have come first.
        timed_tokens: Of those whose time is known: it may have compiled for the others.
        seconds: That it took for these.
        answers: Whether it did not fail to answer for too long.
    """

    name: str
    tokens: int
    timed_tokens: int
    seconds: float
    answers: bool = True

    @property
    def tokens_per_second(self) -> float | None:
        """While it computes; None where that is not known."""
        return self.timed_tokens / self.seconds if self.seconds > 0 else None

    def and_then(self, later: WorkerFigures) -> WorkerFigures:
        """Both together."""
        return WorkerFigures(
            self.name,
            self.tokens + later.tokens,
            self.timed_tokens + later.timed_tokens,
            self.seconds + later.seconds,
            later.answers,
        )


class Observer:
    """Does nothing; a display or a logger overrides what it wants to know.

    The events of ``qlora_wgpu.train``, in their order: ``note``, ``activity``, ``planned``,
    ``planned_on_host``, ``tuned``, ``loading``, ``setup``, those of the trainer (``started`` to
    ``finished``), ``sampled`` and ``reported``. A ``Trainer`` of one's own tells its part alone;
    ``warning`` may come at any time. From within an event, ``stop_run`` ends the run.
    """

    _reason: str | None = None

    def stop_run(self, reason: str = "an observer stopped it") -> None:
        """Asks the run to end as Ctrl-C does: after the current step, its state saved.

        Args:
            reason: Why; kept as ``TrainResult.stop_reason``.
        """
        self._reason = reason

    @property
    def stop_reason(self) -> str | None:
        """Why the run is to end; None while it may go on."""
        return self._reason

    def forget_stop(self) -> None:
        """A run begins, which nobody has stopped yet."""
        self._reason = None

    def note(self, text: str) -> None:
        """Something to know of the settings or the model before the run begins."""

    def warning(self, text: str) -> None:
        """Something the user should know of, which does not end the run."""

    def activity(self, text: str) -> None:
        """Something is being done besides steps, such as reading data; empty when it is over."""

    def planned(self, memory: Counter[str]) -> None:
        """The memory that training will take on the device is planned: bytes by kind."""

    def planned_on_host(self, memory: Counter[str], mapped: int) -> None:
        """The host memory that this process will take is planned: bytes by kind.

        ``mapped`` are bytes of weights that wait on disk, and take none of it. A software GPU's
        memory, which ``planned`` tells, is the host's, too.
        """

    def tuned(self, notes: Sequence[str]) -> None:
        """Kernels were timed; ``notes`` tell how they are cut now."""

    def loading(self, name: str, done: int, total: int) -> None:
        """A tensor is about to be read, after ``done`` of ``total``; all are there at the end."""

    def setup(self, setup: RunSetup) -> None:
        """The model is on the device."""

    def started(self, total_steps: int, done: int, memory: Counter[str]) -> None:
        """Steps are about to begin or go on; ``memory`` is what is taken, bytes by kind."""

    def resumed(self, checkpoint: Path, step: int) -> None:
        """A run goes on after ``step`` steps."""

    def workers(self, workers: Sequence[WorkerFigures]) -> None:
        """The workers of a cluster have done a logged step; told before its row."""

    def step(self, row: Row) -> None:
        """A step's row of metrics.jsonl."""

    def evaluation(self, row: Row) -> None:
        """An evaluation's row of metrics.jsonl."""

    def written(self, step: int, texts: Sequence[Written]) -> None:
        """The model has continued texts after a step, as ``eval.sample_steps`` asks for."""

    def saved(self, folder: Path) -> None:
        """A checkpoint or the adapter was written."""

    def finished(self, result: TrainResult) -> None:
        """The last step is done and the adapter is written."""

    def sampled(self, sample: Sample) -> None:
        """The model has continued a text: before training, and again with ``after`` filled in."""

    def reported(self, paths: Sequence[Path]) -> None:
        """Pages and pictures of the run were written."""


_OTHERS = ("stop_run", "stop_reason", "forget_stop")
EVENTS = tuple(n for n in vars(Observer) if not n.startswith("_") and n not in _OTHERS)


class Unwatched(Observer):
    """Where nobody listens: what the user should know of comes as a warning of Python's."""

    def warning(self, text: str) -> None:
        """Warns of it."""
        warnings.warn(text, QLoRAWarning, stacklevel=2)


class EventRows(Observer):
    """Gives every event as a row that JSON can hold: ``event``, and what it tells by its name.

    What tells of one thing, such as a step's row, is not nested. The result has a row of its own
    when all is written, instead of ``finished``.
    """

    def __init__(self, write: Callable[[Row], None]) -> None:
        """Hands each row on."""
        self.write = write

    def finished(self, result: TrainResult) -> None:
        """Waits for the texts and pages that the result will name, too."""


def _row_of(event: str) -> Callable[..., None]:
    names = list(signature(getattr(Observer, event)).parameters)[1:]

    def tell(self: EventRows, *details: Any) -> None:
        values = [as_json(each) for each in details]
        is_whole = is_dataclass(details[0]) or names == ["row"]
        self.write(
            {"event": event, **(values[0] if is_whole else dict(zip(names, values, strict=True)))}
        )

    return tell


for _event in EVENTS:
    if _event not in vars(EventRows):
        setattr(EventRows, _event, _row_of(_event))


# ---- the hub -------------------------------------------------------------------------------------


@dataclass
class _Subscriber:
    observer: Observer
    on_error: Literal["stop", "drop"]
    has_failed: bool = False


class Events(Observer):
    """Tells all who have subscribed of a run's events, in their order; there is one for a run.

    An event may come while a step is half noted, so an observer's error must not end the run there:
    it is kept, the observer is told no more, and the run ends after the step. An error of one that
    may be dropped, such as a service, is warned of, and the run goes on.
    """

    def __init__(self) -> None:
        """Nobody has subscribed yet."""
        self._subscribers: list[_Subscriber] = []
        self._failure: CallbackError | None = None

    @classmethod
    def of(cls, observer: Observer | None) -> Events:
        """The events of a run that an observer watches; without one they come as warnings."""
        if isinstance(observer, Events):
            return observer
        events = cls()
        events.subscribe(observer or Unwatched())
        return events

    def subscribe(self, observer: Observer, on_error: Literal["stop", "drop"] = "stop") -> None:
        """Tells an observer of what comes, until it fails."""
        self._subscribers.append(_Subscriber(observer, on_error))

    @property
    def stop_reason(self) -> str | None:
        """The first reason that somebody gives."""
        reasons = (self._reason, *(each.observer.stop_reason for each in self._subscribers))
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def failure(self) -> CallbackError | None:
        """What an observer has raised, which ends the run."""
        return self._failure

    def check(self) -> None:
        """Raises what has failed, if something has; its cause is the observer's own error."""
        if self._failure is not None:
            raise self._failure

    def forget_stop(self) -> None:
        """A run begins, in which nobody has failed yet."""
        super().forget_stop()
        self._failure = None
        for each in self._subscribers:
            each.has_failed = False
            each.observer.forget_stop()

    def close(self) -> None:
        """Ends what services have begun, which are told no more."""
        for each in self._subscribers:
            if each.on_error == "drop" and hasattr(each.observer, "close"):
                self._tell(each, "close", ())
        self._subscribers = [each for each in self._subscribers if each.on_error == "stop"]

    def _tell(self, subscriber: _Subscriber, event: str, details: tuple[Any, ...]) -> None:
        if subscriber.has_failed:
            return
        try:
            getattr(subscriber.observer, event)(*details)
        except Exception as err:  # an observer's errors have no common base
            subscriber.has_failed = True
            name = type(subscriber.observer).__name__
            if subscriber.on_error == "drop":
                self.warning(f"{name} gets no more rows: {err}")
            else:
                if not isinstance(err, CallbackError):
                    err = failure_of(f"{name}.{event}", err)
                self._failure = self._failure or err


def _told(event: str) -> Callable[..., None]:
    def tell(self: Events, *details: Any) -> None:
        for subscriber in self._subscribers:
            self._tell(subscriber, event, details)

    return tell


for _event in EVENTS:  # so that no event can be forgotten
    setattr(Events, _event, _told(_event))


def failure_of(what: str, err: Exception, when: str = "") -> CallbackError:
    """The error about something of the user's that has failed, and why; ``when`` it was called."""
    kind = "" if isinstance(err, QLoRAError) else f"{type(err).__name__}: "
    said = f"{kind}{err}" if str(err) else type(err).__name__
    failure = CallbackError(f"{what} failed{when}: {said}")
    failure.__cause__ = err
    return failure
