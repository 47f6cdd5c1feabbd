"""Observers that pass a run's rows on to other programs, and several observers as one."""

from __future__ import annotations

import importlib
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint import write_file
from qlora_wgpu.errors import CallbackError, ConfigError
from qlora_wgpu.files import file_text
from qlora_wgpu.training.observer import EVENTS, Observer, Row

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
