"""The services that ``log.report_to`` names: TensorBoard, Weights & Biases and trackio."""

from __future__ import annotations

import importlib
import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint import write_file
from qlora_wgpu.config.paths import RunPaths
from qlora_wgpu.errors import ConfigError, install_command
from qlora_wgpu.files import file_text
from qlora_wgpu.training.observers import Observer, Row

_ID, _ID_BYTES = re.compile(r"[\w-]{1,128}"), 1024


class Service(Observer):
    """Logs the rows of metrics.jsonl to a service, by names such as ``train/loss``."""

    def step(self, row: Row) -> None:
        """Logs a step."""
        self._log_row("train", row)

    def evaluation(self, row: Row) -> None:
        """Logs an evaluation."""
        self._log_row("eval", row)

    def _log_row(self, section: str, row: Row) -> None:
        self.log({f"{section}/{key}": value for key, value in flat(row).items()}, row["step"])

    def log(self, values: dict[str, Any], step: int) -> None:
        """Logs a row's values."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the run at the service."""


class TensorBoard(Service):
    """Writes event files for ``tensorboard --logdir``."""

    def __init__(self, folder: Path) -> None:
        # TensorBoard's own writer: PyTorch's would need PyTorch.
        self._event = _required("tensorboard", "compat.proto.event_pb2").Event
        self._summary = _required("tensorboard", "compat.proto.summary_pb2").Summary
        self._writer = _required("tensorboard", "summary.writer.record_writer").RecordWriter
        self._folder = folder
        self._file: Path | None = None

    def log(self, values: dict[str, Any], step: int) -> None:
        """Appends the values to a file that is created for the first ones."""
        named = [self._summary.Value(tag=k, simple_value=float(v)) for k, v in values.items()]
        if self._file is None:
            self._file = self._new_file()
        self._append(self._file, self._event(step=step, summary=self._summary(value=named)))

    def _new_file(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        self._append(self._folder / name, self._event(file_version="brain.Event:2"))
        return self._folder / name

    def _append(self, path: Path, event: Any) -> None:
        """Writes without TensorBoard's thread, so that a failure raises an error here."""
        event.wall_time = time.time()
        with path.open("ab") as file:
            self._writer(file).write(event.SerializeToString())


class WeightsAndBiases(Service):
    """Logs to Weights & Biases, with its own settings and environment variables.

    The run's folder stores its id there, so that a resumed run continues there.
    """

    def __init__(self, folder: Path, config: dict[str, Any], *, resume: bool = False) -> None:
        wandb = _required("wandb")
        folder.mkdir(parents=True, exist_ok=True)
        self._id_file = RunPaths(folder).wandb_id
        known = _kept_id(self._id_file) if resume else None
        same = {} if known is None else {"id": known, "resume": "allow"}
        try:
            self._run = wandb.init(dir=str(folder), name=folder.name, config=config, **same)
        except Exception as err:  # wandb's errors have no common base
            raise ConfigError(f"Weights & Biases cannot start a run: {err}") from err
        self._has_kept_id = False

    def log(self, values: dict[str, Any], step: int) -> None:
        """Logs the values; the first time, when the run owns its folder, stores the id."""
        self._run.log(values, step=step)
        if not self._has_kept_id:
            self._has_kept_id = True
            write_file(self._id_file, f"{self._run.id}\n".encode())

    def close(self) -> None:
        """Ends the run, so that another one may start in this process."""
        self._run.finish()


class Trackio(Service):
    """Logs to trackio, on this machine or where its environment variables direct it.

    The run has the name of its folder, in the project ``TRACKIO_PROJECT``.
    """

    def __init__(self, folder: Path, config: dict[str, Any], *, resume: bool = False) -> None:
        self._trackio = _required("trackio")
        project = os.environ.get("TRACKIO_PROJECT") or "qlora-wgpu"
        try:
            with redirect_stdout(StringIO()):  # it prints to the terminal
                self._run = self._trackio.init(
                    project=project, name=folder.name, config=config, embed=False,
                    resume="allow" if resume else "never",
                )  # fmt: skip
        except Exception as err:  # its errors have no common base
            raise ConfigError(f"trackio cannot start a run: {err}") from err

    def log(self, values: dict[str, Any], step: int) -> None:
        """Logs the values."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Ends the run after writing everything."""
        with redirect_stdout(StringIO()):
            self._trackio.finish()


def _required(package: str, module: str = "") -> Any:
    try:
        return importlib.import_module(f"{package}.{module}" if module else package)
    except ImportError:
        raise ConfigError(
            f"log.report_to names {package}, which is not installed: {install_command(package)}"
        ) from None


def _kept_id(path: Path) -> str | None:
    try:
        text = file_text(path, _ID_BYTES).strip()
    except (OSError, ValueError):
        return None
    return text if _ID.fullmatch(text) else None


def flat(row: Row) -> dict[str, Any]:
    """A row's values without its step, flattened to names such as ``workers/0/share``."""
    values: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            values |= {f"{key}/{inner}": v for inner, v in flat(value).items()}
        elif key != "step" and value is not None:
            values[key] = value
    return values


def services(
    names: Sequence[str], folder: Path, config: dict[str, Any], *, resume: bool = False
) -> list[Service]:
    """Starts the services that ``log.report_to`` names, for the run in a folder."""
    started: list[Service] = []
    for name in names:
        if name == "tensorboard":
            started.append(TensorBoard(RunPaths(folder).tensorboard))
        elif name == "trackio":
            started.append(Trackio(folder, config, resume=resume))
        else:
            started.append(WeightsAndBiases(folder, config, resume=resume))
    return started
