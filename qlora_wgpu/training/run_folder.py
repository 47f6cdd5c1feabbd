"""A run's folder: config.yaml, metrics.jsonl, checkpoints/, best/ and adapter/, and its lock."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from qlora_wgpu.checkpoint import (
    FileLock,
    append_line,
    flush_file,
    recover,
    recover_all,
    remove,
    write_file,
)
from qlora_wgpu.config import Config
from qlora_wgpu.config.paths import RunPaths
from qlora_wgpu.data import Dataset
from qlora_wgpu.errors import CheckpointError, ConfigError, brief, command, option, shell_word
from qlora_wgpu.files import broken_link, exists, file_bytes, is_dir
from qlora_wgpu.limits import OWN_LOG_BYTES
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.training.observers import Row

# ---- identity ------------------------------------------------------------------------------------

_SOURCES = ("train", "sources", "eval", "chat_template")
"""Settings of the data that may differ as long as the examples are the same."""


class RunFingerprint:
    """The identity of a run, which its checkpoints store."""

    def __init__(
        self,
        model: AdapterModel,
        config: Config,
        rows: Dataset,
        held_out: Dataset | None,
        references: str | None = None,
    ) -> None:
        self._references = references
        self._folder = model.folder
        self._folder.finish_fingerprint()
        own = config.model_copy(update={"lora": model.adapter.config, "quant": model.quant})
        self._settings = {
            **own.fixed_settings(),
            "train.compute_dtype": model.compute_dtype,
            "train.gradient_dtype": model.adapter.forms.gradient,
        }
        self._data = rows.fingerprint
        self._held_out = held_out.fingerprint if held_out is not None else None
        self._sources = {key: getattr(config.data, key) for key in _SOURCES}
        init_from = config.lora.init_from
        self._init_from = None if init_from is None else adapter_fingerprint(init_from)

    @cached_property
    def record(self) -> dict[str, Any]:
        """The identity as JSON; waits until the base weights are hashed."""
        return {
            "settings": json.loads(json.dumps(self._settings)),
            "data": self._data,
            "held_out_data": self._held_out,
            "sources": json.loads(json.dumps(self._sources, default=dict)),
            "base": self._folder.fingerprint,
            "begun_from": self._init_from,
            "references": self._references,
        }

    def refuse_other(self, kept: Mapping[str, Any], where: str) -> None:
        """Refuses a checkpoint of another run."""
        refuse_other_settings(kept["settings"], self.record["settings"], where)
        for key, name, advice in (
            ("data", "training data", "the same data"),
            ("held_out_data", "held-out data", "the same data"),
            ("base", "base weights", "the same base"),
            ("references", "log probabilities of the reference model", "the same adapter"),
            ("begun_from", "values of the adapter in lora.init_from", "the same adapter"),
        ):
            if kept.get(key, self.record[key]) != self.record[key]:  # older versions stored fewer
                named = _difference(name, kept[key], self)
                if key in ("data", "held_out_data"):
                    named += self._changes_since(kept.get("sources", {}))
                raise ConfigError(
                    f"the run in {where} was started with other {named}: resume it with {advice}, "
                    "or start a new run in another output.dir"
                )

    def _changes_since(self, before: Mapping[str, Any]) -> str:
        """The settings of the data that have changed, in brackets; may be empty."""
        now = self.record["sources"]
        changes = [
            f"data.{key} was {brief(old)}, now it is {brief(now[key])}"
            for key, old in before.items()
            if key in now and old != now[key]
        ]
        return f" ({'; '.join(changes)})" if changes else ""


def adapter_fingerprint(folder: str) -> str:
    """A hash of the tensors in an adapter's folder."""
    digest = hashlib.sha256()
    for name, array in sorted(load_adapter(Path(folder))[0].items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


def refuse_other_settings(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Refuses to resume a run with other settings that affect training."""
    for key, value in now.items():
        old = before.get(key, value)
        if old != value:
            kept = f"`qlora-wgpu train {shell_word(str(where))} --resume`" if command() else where
            raise ConfigError(
                f"the run in {where} was started with {key} = {old!r}, now it is {value!r}: resume "
                f"it with the old setting ({kept} has all of them), or start a new run in another "
                "output.dir"
            )


def _difference(name: str, kept: Any, identity: RunFingerprint) -> str:
    """What differs, in words; of a base, it may be only its config.json."""
    base = identity.record["base"]
    if name != "base weights" or kept["weights"] != base["weights"]:
        return name
    return "values in the base's config.json"


# ---- one run of a model at a time ----------------------------------------------------------------

_runs: WeakKeyDictionary[AdapterModel, str] = WeakKeyDictionary()
_lock = Lock()


@contextmanager
def exclusive(model: AdapterModel, folder: str) -> Iterator[None]:
    """While it is entered, no other run can train the model.

    Two runs would train the same parameters, and neither could be resumed.
    """
    with _lock:
        if model in _runs:
            raise ConfigError(
                f"the run in {_runs[model]} is training this model: wait for its end, or open the "
                "model again for the other run"
            )
        _runs[model] = folder
    try:
        yield
    finally:
        with _lock:
            _runs.pop(model, None)


# ---- backup of a replaced run --------------------------------------------------------------------


class RunBackup:
    """Moves a run aside, file by file, so that a kill in between loses nothing.

    config.yaml is moved first and restored last. A folder without it but with moved files is one
    whose new run never started, and ``settle`` restores everything.
    """

    def __init__(self, run: RunPaths) -> None:
        self._config, self._aside = run.config, run.replaced
        self._parts = [run.config, *(part for part in run.written if part != run.config)]

    def move_aside(self) -> None:
        """Moves all files of the run into ``replaced/``."""
        self.remove()
        self._aside.mkdir()
        for part in self._parts:
            if exists(part):
                part.rename(self._aside / part.name)

    def settle(self) -> None:
        """Restores the files of a run whose replacement never started."""
        recover(self._aside)
        if not exists(self._aside) or exists(self._config):
            return
        for part in reversed(self._parts):
            moved = self._aside / part.name
            if exists(moved) and not exists(part):
                moved.rename(part)
        self.remove()

    def remove(self) -> None:
        """Removes ``replaced/``, if it exists."""
        remove(self._aside)


# ---- metrics.jsonl: a row for each logged step and each evaluation -------------------------------


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl, without incomplete or invalid lines."""
    try:
        text = file_bytes(path, OWN_LOG_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as err:
        raise CheckpointError(f"cannot read {path}: {err.strerror or err}") from err
    return [row for line in text.splitlines() if (row := _row(line)) is not None]


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is never logged")


class RunLog:
    """Appends rows; those that cannot be written are buffered, and never end a run."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Writes nothing yet; ``warn`` is called once if rows cannot be written."""
        self._path, self._warn = path, warn
        self._buffer: list[str] = []
        self._has_warned = False
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """A hash of all rows, buffered ones included."""
        return self._digest.hexdigest()[:16]

    def begin(self) -> None:
        """Empties the file."""
        self._digest = hashlib.sha256()
        write_file(self._path, b"")

    def append(self, row: Row) -> None:
        """Adds a row."""
        line = json.dumps(row, allow_nan=False)
        self._digest.update(f"{line}\n".encode())
        self._buffer.append(line)
        self._write_buffer()

    def close(self) -> None:
        """Tries again to write buffered rows, and warns of those that are missing."""
        self._write_buffer()
        if self._buffer:
            self._warn(f"the last {len(self._buffer)} rows are missing from {self._path}")

    def _write_buffer(self) -> None:
        try:
            while self._buffer:
                append_line(self._path, self._buffer[0])
                self._buffer.pop(0)
        except CheckpointError as err:
            self._warn_once(err)

    def flush(self) -> None:
        """Flushes rows to the disk, since a checkpoint relies on them."""
        self._write_buffer()
        try:
            flush_file(self._path)
        except CheckpointError as err:
            self._warn_once(err)

    def keep(self, is_kept: Callable[[Row], bool]) -> None:
        """Removes all other rows."""
        rows = read_rows(self._path)
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows if is_kept(row))
        self._digest = hashlib.sha256(text.encode())
        write_file(self._path, text.encode())

    def _warn_once(self, err: CheckpointError) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"{err}; training continues, and writing is tried again with each row")


# ---- the folder ----------------------------------------------------------------------------------

_PROBE = ".qlora-wgpu-"
_BUSY = "another run is using output.dir {}: wait for its end, or choose another folder"


def refuse_existing_run(path: Path) -> None:
    """Raises a ConfigError if a folder contains a model, or files that a run would replace."""
    if exists(path / "config.json"):  # chat would then open the model without the adapter
        raise ConfigError(f"output.dir {path} has a model (config.json): choose another folder")
    paths = RunPaths(path)
    written = next((part for part in (*paths.needed, paths.replaced) if exists(part)), None)
    if written is not None:
        raise ConfigError(
            f"output.dir {path} already contains a run ({written.name}): choose another folder, "
            f"or train with {option('resume')} to continue it or with {option('overwrite')} to "
            "replace it"
        )


def require_writable(path: Path) -> None:
    """Checks that a run can write its folder, before anything takes time."""
    _refuse_busy(path)
    try:
        folders = (path, *path.absolute().parents)
        for folder in folders:
            if (link := broken_link(folder)) is not None:
                raise ConfigError(f"output.dir {path} cannot be written: {link}")
        existing = next((folder for folder in folders if exists(folder)), None)
        if existing is None:  # another drive or server of Windows
            raise ConfigError(f"output.dir {path} cannot be written: {folders[-1]} does not exist")
        if not is_dir(existing):
            raise ConfigError(f"output.dir {path} cannot be written: {existing} is not a folder")
        for leftover in existing.glob(f"{_PROBE}*"):  # of a process that was killed
            with suppress(OSError):
                leftover.rmdir()
        tempfile.TemporaryDirectory(prefix=_PROBE, dir=existing).cleanup()
    except OSError as err:
        raise ConfigError(f"output.dir {path} cannot be written: {err.strerror or err}") from err


def _refuse_busy(path: Path) -> None:
    """Raises a ConfigError if another run has locked a folder."""
    lock = FileLock(RunPaths(path).lock)
    with suppress(OSError):  # writing the folder will report it
        if exists(lock.path) and not lock.acquire():
            raise ConfigError(_BUSY.format(path))
        lock.release()


def settle_run(path: Path) -> None:
    """Cleans up after a killed run in a folder, if there is one."""
    paths = RunPaths(path)
    if any(map(exists, (*paths.written, paths.replaced))):
        RunFolder(path, "", resume=True).close()


class RunFolder(RunPaths):
    """Writes a run's files. While it is open, no other run can use the folder."""

    def __init__(
        self,
        path: Path,
        config_yaml: str,
        *,
        overwrite: bool = False,
        resume: bool = False,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Creates and locks the folder, and writes config.yaml unless the run is resumed."""
        super().__init__(path)
        self.log = RunLog(self.metrics, warn)
        self.texts = RunLog(self.samples, warn)
        self.backup = RunBackup(self)  # of the run that this one replaces
        self._lock = FileLock(self.lock)
        self._total_steps: int | None = None
        if not (overwrite or resume):
            _refuse_busy(path)
            refuse_existing_run(path)
        try:
            self._open()
            if not resume:
                if not overwrite:
                    refuse_existing_run(path)  # again, now that the folder is locked
                self.begin(config_yaml)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        with self._explained():
            self.path.mkdir(parents=True, exist_ok=True)
            if not self._lock.acquire():
                raise ConfigError(_BUSY.format(self.path))
            for part in self.written:
                recover(part)
            recover_all(self.checkpoints)
            self.backup.settle()

    def begin(self, config_yaml: str) -> None:
        """Clears the folder for a new run and writes its first files.

        An existing run with a checkpoint or an adapter is moved aside until the new one has one.
        """
        with self._explained():
            if exists(self.adapter) or checkpoint_folders(self.path):
                self.backup.move_aside()
            for part in self.written:
                if part != self.config:  # config.yaml is replaced last, since it marks a run
                    remove(part)
            self.write_config(config_yaml)
            self.checkpoints.mkdir()
            self.log.begin()

    def close(self) -> None:
        """Unlocks the folder."""
        if self._total_steps is not None:
            self._note_progress(None)
        self.log.close()
        self.texts.close()
        self._lock.release()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as err:
            raise ConfigError(f"{err} (output.dir)") from err
        except OSError as err:
            reason = err.strerror or err
            raise ConfigError(f"output.dir {self.path} cannot be written: {reason}") from err

    # -- during the run ----------------------------------------------------------------------------

    def require_own(self) -> None:
        """Raises a CheckpointError if the folder is no longer the one that was opened."""
        if not self._lock.is_in_place:
            raise CheckpointError(f"{self.path} has been removed or replaced")

    def note_steps(self, total: int) -> None:
        """Writes, for ``watch``, the run's process and its number of steps."""
        self._total_steps = total
        self._note_progress(os.getpid())

    def _note_progress(self, pid: int | None) -> None:
        progress = {"total_steps": self._total_steps, "pid": pid, "host": socket.gethostname()}
        with suppress(CheckpointError):  # the run does not depend on it
            if self._lock.is_in_place:
                write_file(self.progress, (json.dumps(progress) + "\n").encode())

    def write_config(self, config_yaml: str) -> None:
        """Writes config.yaml."""
        write_file(self.config, config_yaml.encode())

    def forget_after(self, step: int, logged_step: int, eval_step: int) -> None:
        """Removes the rows and checkpoints of steps that will be repeated."""

        def is_kept(row: dict[str, Any]) -> bool:
            return bool(row["step"] <= (eval_step if "eval_loss" in row else logged_step))

        with self._explained():
            self.log.keep(is_kept)
            if exists(self.samples):
                self.texts.keep(lambda row: bool(row["step"] <= step))
            for folder in checkpoint_folders(self.path):
                if step_of(folder) > step:
                    remove(folder)

    def checkpoint_folder(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.checkpoints / f"step-{step}"

    def prune(self, keep: int | None) -> None:
        """Removes all but the newest ``keep`` checkpoints, and incomplete ones."""
        recover_all(self.checkpoints)
        if keep is None:
            return
        for old in checkpoint_folders(self.path)[:-keep]:
            remove(old)


def checkpoint_folders(path: Path) -> list[Path]:
    """The checkpoints of the run in a folder, oldest first."""
    folder = RunPaths(path).checkpoints
    try:
        entries = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as err:
        raise CheckpointError(f"cannot read {folder}: {err.strerror or err}") from err
    return sorted((p for p in entries if step_of(p) >= 0), key=step_of)


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint's folder; -1 for other folders."""
    word, _, digits = folder.name.partition("-")
    is_step = word == "step" and digits.isdecimal() and digits.isascii()
    return int(digits) if is_step else -1
