"""The events that a run tells whoever watches it, and observers that pass them on or may fail."""

from __future__ import annotations

import importlib
import os
import re
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint import write_file
from qlora_wgpu.errors import CallbackError, ConfigError, QLoRAError, QLoRAWarning
from qlora_wgpu.files import file_text
from qlora_wgpu.training.result import Sample, TrainResult, Written

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

    @property
    def failure(self) -> CallbackError | None:
        """What has failed in an observer of the user's, which ends the run; see ``Watched``."""
        return None

    def check(self) -> None:
        """Raises what has failed, if something has.

        Raises:
            CallbackError: It; its cause is the observer's own error.
        """
        if self.failure is not None:
            raise self.failure

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


class Unwatched(Observer):
    """Where nobody listens: what the user should know of comes as a warning of Python's."""

    def warning(self, text: str) -> None:
        """Warns of it."""
        warnings.warn(text, QLoRAWarning, stacklevel=2)


_OTHERS = ("stop_run", "stop_reason", "failure", "check", "forget_stop")
EVENTS = tuple(n for n in vars(Observer) if not n.startswith("_") and n not in _OTHERS)


# ---- reporters: the services of log.report_to ----------------------------------------------------

WANDB_ID = "wandb-id.txt"
_ID, _ID_BYTES = re.compile(r"[\w-]{1,128}"), 1024
_HINT = "log.report_to names {0}, which is not installed: pip install 'qlora-wgpu[{0}]'"


class TensorBoard(Observer):
    """Writes event files that ``tensorboard --logdir`` shows."""

    def __init__(self, folder: Path) -> None:
        """Writes nothing yet.

        Raises:
            ConfigError: If TensorBoard is not installed.
        """
        try:
            # TensorBoard's own writer: PyTorch's would need PyTorch.
            self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
            self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
            records = importlib.import_module("tensorboard.summary.writer.record_writer")
        except ImportError:
            raise ConfigError(_HINT.format("tensorboard")) from None
        self._writer = records.RecordWriter
        self._folder = folder
        self._file: Path | None = None

    def step(self, row: Row) -> None:
        """Passes the row on."""
        self._add("train", row)

    def evaluation(self, row: Row) -> None:
        """Passes the row on."""
        self._add("eval", row)

    def _add(self, section: str, row: Row) -> None:
        values = [
            self._summary.Value(tag=f"{section}/{key}", simple_value=float(value))
            for key, value in flat(row).items()
        ]
        if self._file is None:
            self._file = self._begun()
        self._append(self._file, self._event(step=row["step"], summary=self._summary(value=values)))

    def _begun(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        self._append(self._folder / name, self._event(file_version="brain.Event:2"))
        return self._folder / name

    def _append(self, path: Path, event: Any) -> None:
        """Without TensorBoard's thread, so that what cannot be written is an error here."""
        event.wall_time = time.time()
        with path.open("ab") as file:
            self._writer(file).write(event.SerializeToString())


class WeightsAndBiases(Observer):
    """Logs to Weights & Biases, as its own settings and environment say.

    The run's folder keeps under which id it is known there, so that a run that goes on goes on
    there, too.
    """

    def __init__(self, folder: Path, config: dict[str, Any], *, resume: bool = False) -> None:
        """Begins a run there, or goes on with one.

        Args:
            folder: The run's folder.
            config: The run's settings, for the service to show.
            resume: Whether the run in the folder goes on.

        Raises:
            ConfigError: If wandb is not installed or cannot begin.
        """
        try:
            wandb = importlib.import_module("wandb")
        except ImportError:
            raise ConfigError(_HINT.format("wandb")) from None
        folder.mkdir(parents=True, exist_ok=True)
        self._id_file = folder / WANDB_ID
        known = _kept_id(self._id_file) if resume else None
        same = {} if known is None else {"id": known, "resume": "allow"}
        try:
            self._run = wandb.init(dir=str(folder), name=folder.name, config=config, **same)
        except Exception as err:  # wandb's errors have no common base
            raise ConfigError(f"Weights & Biases cannot begin a run: {err}") from err
        self._has_kept_id = False

    def step(self, row: Row) -> None:
        """Passes the row on."""
        self._log("train", row)

    def evaluation(self, row: Row) -> None:
        """Passes the row on."""
        self._log("eval", row)

    def _log(self, section: str, row: Row) -> None:
        values = {f"{section}/{key}": value for key, value in flat(row).items()}
        self._run.log(values, step=row["step"])
        self._keep_id()

    def _keep_id(self) -> None:
        """Once, and not before the first row: only then is the run's folder its own."""
        if not self._has_kept_id:
            self._has_kept_id = True
            write_file(self._id_file, f"{self._run.id}\n".encode())

    def close(self) -> None:
        """Ends the run there, so that another one may begin in this process."""
        self._run.finish()


class Trackio(Observer):
    """Logs to trackio, on this machine or where its own environment variables say.

    A run has its folder's name there, in the project that ``TRACKIO_PROJECT`` names.
    """

    def __init__(self, folder: Path, config: dict[str, Any], *, resume: bool = False) -> None:
        """Begins a run there, or goes on with the one of that name.

        Args:
            folder: The run's folder.
            config: The run's settings, for its pages to show.
            resume: Whether the run in the folder goes on.

        Raises:
            ConfigError: If trackio is not installed or cannot begin.
        """
        try:
            self._trackio = importlib.import_module("trackio")
        except ImportError:
            raise ConfigError(_HINT.format("trackio")) from None
        project = os.environ.get("TRACKIO_PROJECT") or "qlora-wgpu"
        try:
            with redirect_stdout(StringIO()):  # it prints as if it were alone
                self._run = self._trackio.init(
                    project=project, name=folder.name, config=config, embed=False,
                    resume="allow" if resume else "never",
                )  # fmt: skip
        except Exception as err:  # its errors have no common base
            raise ConfigError(f"trackio cannot begin a run: {err}") from err

    def step(self, row: Row) -> None:
        """Passes the row on."""
        self._log("train", row)

    def evaluation(self, row: Row) -> None:
        """Passes the row on."""
        self._log("eval", row)

    def _log(self, section: str, row: Row) -> None:
        values = {f"{section}/{key}": value for key, value in flat(row).items()}
        self._run.log(values, step=row["step"])

    def close(self) -> None:
        """Ends the run there; what it still has to write is written."""
        with redirect_stdout(StringIO()):
            self._trackio.finish()


def _kept_id(path: Path) -> str | None:
    """The id in a run's folder; None where there is none."""
    try:
        text = file_text(path, _ID_BYTES).strip()
    except (OSError, ValueError):
        return None
    return text if _ID.fullmatch(text) else None


def flat(row: Row) -> dict[str, Any]:
    """A row's values without its step, each by itself, such as ``workers/0/share``."""
    values: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            values |= {f"{key}/{inner}": v for inner, v in flat(value).items()}
        elif key != "step" and value is not None:
            values[key] = value
    return values


class Guarded(Observer):
    """Passes rows on to a reporter until that fails: it is told once, and the run goes on."""

    def __init__(self, reporter: Observer, warn: Callable[[str], None]) -> None:
        """Guards a reporter.

        Args:
            reporter: Who gets the rows.
            warn: Told of the first failure.
        """
        self._reporter: Observer | None = reporter
        self._warn = warn

    def step(self, row: Row) -> None:
        """Passes the row on."""
        self._tell(lambda reporter: reporter.step(row))

    def evaluation(self, row: Row) -> None:
        """Passes the row on."""
        self._tell(lambda reporter: reporter.evaluation(row))

    def close(self) -> None:
        """Ends what the reporter has begun, if it has to be ended."""
        if (close := getattr(self._reporter, "close", None)) is not None:
            self._tell(lambda reporter: close())

    def _tell(self, event: Callable[[Observer], None]) -> None:
        if self._reporter is None:
            return
        try:
            event(self._reporter)
        except Exception as err:  # a service's errors have no common base
            name = type(self._reporter).__name__
            self._reporter = None
            self._warn(f"{name} gets no more rows: {err}")


def reporters(
    names: Sequence[str], folder: Path, config: dict[str, Any], *, resume: bool = False
) -> list[Observer]:
    """The observers that ``log.report_to`` names.

    Args:
        names: The services.
        folder: The run's folder.
        config: The run's settings, for a service to show.
        resume: Whether the run in the folder goes on.

    Raises:
        ConfigError: If what one needs is not installed.
    """
    observers: list[Observer] = []
    for name in names:
        if name == "tensorboard":
            observers.append(TensorBoard(folder / "tensorboard"))
        elif name == "trackio":
            observers.append(Trackio(folder, config, resume=resume))
        else:
            observers.append(WeightsAndBiases(folder, config, resume=resume))
    return observers


# ---- observers that pass events on ---------------------------------------------------------------


class ObserverList(Observer):
    """Several observers, each told of every event in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        """Holds on to them.

        Args:
            observers: Who is told.
        """
        self._all = tuple(observers)

    @property
    def stop_reason(self) -> str | None:
        """The first reason that one of them gives."""
        reasons = (self._reason, *(observer.stop_reason for observer in self._all))
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def failure(self) -> CallbackError | None:
        """The first of theirs."""
        return next((each.failure for each in self._all if each.failure is not None), None)

    def forget_stop(self) -> None:
        """Passes it on."""
        super().forget_stop()
        for observer in self._all:
            observer.forget_stop()


def _forwarded(event: str) -> Callable[..., None]:
    def tell(self: ObserverList, *details: Any) -> None:
        for observer in self._all:
            getattr(observer, event)(*details)

    return tell


for _event in EVENTS:  # so that no event can be forgotten
    setattr(ObserverList, _event, _forwarded(_event))


def failure_of(what: str, err: Exception, when: str = "") -> CallbackError:
    """The sentence about something of the user's that has failed.

    Args:
        what: Its name.
        err: What it raised, which is the cause.
        when: When it was called.
    """
    kind = "" if isinstance(err, QLoRAError) else f"{type(err).__name__}: "
    said = f"{kind}{err}" if str(err) else type(err).__name__
    failure = CallbackError(f"{what} failed{when}: {said}")
    failure.__cause__ = err
    return failure


class Watched(Observer):
    """Passes events on to an observer until it raises something, which is kept.

    An event may come while a step is half noted, so that its error must not end the run there.
    """

    def __init__(self, observer: Observer) -> None:
        """Holds on to it.

        Args:
            observer: Who is told.
        """
        self._observer = observer
        self._failure: CallbackError | None = None

    @property
    def stop_reason(self) -> str | None:
        """The one that it gives."""
        return self._reason or self._observer.stop_reason

    @property
    def failure(self) -> CallbackError | None:
        """What it raised."""
        return self._failure or self._observer.failure

    def forget_stop(self) -> None:
        """A run begins, in which it has not failed yet."""
        super().forget_stop()
        self._failure = None
        self._observer.forget_stop()


def _forwarded_while_sound(event: str) -> Callable[..., None]:
    def tell(self: Watched, *details: Any) -> None:
        if self._failure is not None:
            return
        try:
            getattr(self._observer, event)(*details)
        except Exception as err:
            self._failure = failure_of(f"{type(self._observer).__name__}.{event}", err)

    return tell


for _event in EVENTS:  # so that no event can be forgotten
    setattr(Watched, _event, _forwarded_while_sound(_event))
