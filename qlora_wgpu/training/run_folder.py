"""A run's folder: config.yaml, metrics.jsonl, checkpoints/, best/ and adapter/; whose it is."""

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
from qlora_wgpu.errors import CheckpointError, ConfigError, brief, command, option
from qlora_wgpu.files import broken_link, exists, file_bytes, is_dir
from qlora_wgpu.limits import OWN_LOG_BYTES
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.shell_words import shell_word
from qlora_wgpu.training.observers import Row

# ---- which run it is -----------------------------------------------------------------------------

_SOURCES = ("train", "sources", "eval", "chat_template")
"""Settings of the data that may differ as long as the same is learnt."""


class RunFingerprint:
    """The identity of a run, as every checkpoint of it keeps it."""

    def __init__(
        self,
        model: AdapterModel,
        config: Config,
        rows: Dataset,
        held_out: Dataset | None,
        references: str | None = None,
    ) -> None:
        """Begins to hash what has not been hashed of the base weights."""
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
        begun_from = config.lora.init_from
        self._begun_from = None if begun_from is None else adapter_fingerprint(begun_from)

    @cached_property
    def record(self) -> dict[str, Any]:
        """The identity as JSON has it; waits for the base weights to be hashed."""
        return {
            "settings": json.loads(json.dumps(self._settings)),
            "data": self._data,
            "held_out_data": self._held_out,
            "sources": json.loads(json.dumps(self._sources, default=dict)),
            "base": self._folder.fingerprint,
            "begun_from": self._begun_from,
            "references": self._references,
        }

    def refuse_other(self, kept: Mapping[str, Any], where: str) -> None:
        """Makes sure that a checkpoint is this run's."""
        refuse_other_settings(kept["settings"], self.record["settings"], where)
        for key, name, advice in (
            ("data", "training data", "the same"),
            ("held_out_data", "held-out data", "the same"),
            ("base", "base weights", "the base that it was begun with"),
            ("references", "numbers of the reference model", "the adapter it was begun with"),
            ("begun_from", "values of the adapter in lora.init_from", "the same"),
        ):
            if kept.get(key, self.record[key]) != self.record[key]:  # older versions know fewer
                named = _named(name, kept[key], self)
                if key in ("data", "held_out_data"):
                    named += self._changes_since(kept.get("sources", {}))
                raise ConfigError(
                    f"the run in {where} was begun with other {named}: go on with {advice}, or "
                    "begin a new run in another output.dir"
                )

    def _changes_since(self, before: Mapping[str, Any]) -> str:
        """The settings that differ of where data is and how chats are written, in brackets."""
        now = self.record["sources"]
        changes = [
            f"data.{key} was {brief(old)}, now it is {brief(now[key])}"
            for key, old in before.items()
            if key in now and old != now[key]
        ]
        return f" ({'; '.join(changes)})" if changes else ""


def adapter_fingerprint(folder: str) -> str:
    """A hash of the values in an adapter's folder."""
    digest = hashlib.sha256()
    for name, array in sorted(load_adapter(Path(folder))[0].items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


def refuse_other_settings(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Makes sure that a run goes on with the settings that decide what is computed."""
    for key, value in now.items():
        old = before.get(key, value)
        if old != value:
            kept = f"`qlora-wgpu train {shell_word(str(where))} --resume`" if command() else where
            raise ConfigError(
                f"the run in {where} was begun with {key} = {old!r}, now it is {value!r}: go on "
                f"with the old setting ({kept} has all of them), or begin a new run in another "
                "output.dir"
            )


def _named(name: str, kept: Any, identity: RunFingerprint) -> str:
    """The words for what differs; of a base, it may be its config.json alone."""
    base = identity.record["base"]
    if name != "base weights" or kept["weights"] != base["weights"]:
        return name
    return "values in the base's config.json"


# ---- one run of a model at a time ----------------------------------------------------------------

_runs: WeakKeyDictionary[AdapterModel, str] = WeakKeyDictionary()
_lock = Lock()


@contextmanager
def exclusive(model: AdapterModel, folder: str) -> Iterator[None]:
    """Keeps other runs from a model.

    Two at a time would each go on from what the other one has learnt, and neither could be resumed.
    """
    with _lock:
        if model in _runs:
            raise ConfigError(
                f"the run in {_runs[model]} trains this model: let it end, or open the model once "
                "more for the other run"
            )
        _runs[model] = folder
    try:
        yield
    finally:
        with _lock:
            _runs.pop(model, None)


# ---- a run that another one replaces -------------------------------------------------------------


class RunBackup:
    """Moves a run aside, part by part, so that a kill in between loses nothing.

    config.yaml goes first and comes back last. So a folder without it, beside parts that were
    moved, is one where the successor never began, and ``recover`` brings everything back.
    """

    def __init__(self, run: RunPaths) -> None:
        """Takes a run's folder."""
        self._config, self._aside = run.config, run.replaced
        self._parts = [run.config, *(part for part in run.written if part != run.config)]

    def move_aside(self) -> None:
        """Moves everything that the run has written."""
        self.remove()
        self._aside.mkdir()
        for part in self._parts:
            if exists(part):
                part.rename(self._aside / part.name)

    def settle(self) -> None:
        """Brings back what was moved for a successor that has not begun."""
        recover(self._aside)
        if not exists(self._aside) or exists(self._config):
            return
        for part in reversed(self._parts):
            moved = self._aside / part.name
            if exists(moved) and not exists(part):
                moved.rename(part)
        self.remove()

    def remove(self) -> None:
        """Removes what was moved aside; nothing where there is none."""
        remove(self._aside)


# ---- metrics.jsonl: a row for each logged step and each evaluation -------------------------------


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl; what is torn or no row is left out."""
    try:
        text = file_bytes(path, OWN_LOG_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as err:
        raise CheckpointError(f"{path} cannot be read: {err.strerror or err}") from err
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
    """Appends rows. One that cannot be written waits for the next; it never ends a run."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Writes nothing yet; ``warn`` is told, once, that rows cannot be written."""
        self._path, self._warn = path, warn
        self._waiting: list[str] = []
        self._has_warned = False
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """A hash of all rows, those that wait included."""
        return self._digest.hexdigest()[:16]

    def begin(self) -> None:
        """Empties it."""
        self._digest = hashlib.sha256()
        write_file(self._path, b"")

    def append(self, row: Row) -> None:
        """Adds a row."""
        line = json.dumps(row, allow_nan=False)
        self._digest.update(f"{line}\n".encode())
        self._waiting.append(line)
        self._write_waiting()

    def close(self) -> None:
        """Tries once more to write what still waits, and tells how much is missing."""
        self._write_waiting()
        if self._waiting:
            self._warn(f"{self._path} lacks its last {len(self._waiting)} rows")

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                append_line(self._path, self._waiting[0])
                self._waiting.pop(0)
        except CheckpointError as err:
            self._complain(err)

    def flush(self) -> None:
        """Brings what was appended to the disk, as a checkpoint relies on its rows being there."""
        self._write_waiting()
        try:
            flush_file(self._path)
        except CheckpointError as err:
            self._complain(err)

    def keep(self, is_kept: Callable[[Row], bool]) -> None:
        """Removes all rows but some."""
        rows = read_rows(self._path)
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows if is_kept(row))
        self._digest = hashlib.sha256(text.encode())
        write_file(self._path, text.encode())

    def _complain(self, err: CheckpointError) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"{err}; training goes on, and tries again with each row")


# ---- the folder ----------------------------------------------------------------------------------

_PROBE = ".qlora-wgpu-"
_BUSY = "another run is writing output.dir {}: wait for its end, or choose another folder"


def refuse_existing_run(path: Path) -> None:
    """Raises a ConfigError if a folder holds a model, or anything that a run would replace."""
    if exists(path / "config.json"):  # by its name, chat would open the model alone
        raise ConfigError(f"output.dir {path} holds a model (config.json): choose another folder")
    paths = RunPaths(path)
    written = next((part for part in (*paths.needed, paths.replaced) if exists(part)), None)
    if written is not None:
        raise ConfigError(
            f"output.dir {path} already holds a run ({written.name}): choose another folder, or "
            f"train with {option('resume')} to go on with it or with {option('overwrite')} to "
            "replace it"
        )


def require_writable(path: Path) -> None:
    """Makes sure, before anything takes time, that a run can write its folder."""
    _refuse_busy(path)
    try:
        around = (path, *path.absolute().parents)
        for place in around:
            if (link := broken_link(place)) is not None:
                raise ConfigError(f"output.dir {path} cannot be written: {link}")
        there = next((place for place in around if exists(place)), None)
        if there is None:  # another drive or server, of Windows
            raise ConfigError(f"output.dir {path} cannot be written: {around[-1]} does not exist")
        if not is_dir(there):
            raise ConfigError(f"output.dir {path} cannot be written: {there} is no folder")
        for left in there.glob(f"{_PROBE}*"):  # by one that was killed, or could not remove it
            with suppress(OSError):
                left.rmdir()
        tempfile.TemporaryDirectory(prefix=_PROBE, dir=there).cleanup()
    except OSError as err:
        raise ConfigError(f"output.dir {path} cannot be written: {err.strerror or err}") from err


def _refuse_busy(path: Path) -> None:
    """Raises a ConfigError if another run is writing a folder, whatever it has written so far."""
    lock = FileLock(RunPaths(path).lock)
    with suppress(OSError):  # which is told when it is written
        if exists(lock.path) and not lock.acquire():
            raise ConfigError(_BUSY.format(path))
        lock.release()


def settle_run(path: Path) -> None:
    """Clears up what a killed run left in a folder, if there is one."""
    paths = RunPaths(path)
    if any(map(exists, (*paths.written, paths.replaced))):
        RunFolder(path, "", resume=True).close()


class RunFolder(RunPaths):
    """Writes what a run leaves behind. While it is open, no other run can have the folder."""

    def __init__(
        self,
        path: Path,
        config_yaml: str,
        *,
        overwrite: bool = False,
        resume: bool = False,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Creates the folder and saves the resolved configuration in it."""
        super().__init__(path)
        self.log = RunLog(self.metrics, warn)
        self.texts = RunLog(self.samples, warn)  # what the model has written
        self._replaced = RunBackup(self)
        self._lock = FileLock(self.lock)
        self._total_steps: int | None = None
        if not (overwrite or resume):
            _refuse_busy(path)
            refuse_existing_run(path)
        try:
            self._open()
            if not resume:
                if not overwrite:
                    refuse_existing_run(path)  # now that nobody else can begin one
                self.begin(config_yaml)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Takes the folder, and clears up what a killed run left."""
        with self._explained():
            self.path.mkdir(parents=True, exist_ok=True)
            if not self._lock.acquire():
                raise ConfigError(_BUSY.format(self.path))
            for part in self.written:
                recover(part)
            recover_all(self.checkpoints)
            self._replaced.settle()

    def begin(self, config_yaml: str) -> None:
        """Makes place for a run and writes what it starts with.

        A run that is there and has a checkpoint or an adapter is moved aside, until this one has
        either, too.
        """
        with self._explained():
            if exists(self.adapter) or checkpoint_folders(self.path):
                self._replaced.move_aside()
            for part in self.written:
                if part != self.config:  # the last to go, since it says that this is a run
                    remove(part)
            self.write_config(config_yaml)
            self.checkpoints.mkdir()
            self.log.begin()

    def close(self) -> None:
        """Lets another run have the folder."""
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

    # -- while it goes on ---------------------------------------------------------------------

    def require_own(self) -> None:
        """Makes sure that the folder is still the one that was opened."""
        if not self._lock.is_in_place:
            raise CheckpointError(f"{self.path} has been removed or replaced")

    def note_steps(self, total: int) -> None:
        """Notes, for who watches, that this process runs it, and how many steps it is to have."""
        self._total_steps = total
        self._note_progress(os.getpid())

    def _note_progress(self, pid: int | None) -> None:
        told = {"total_steps": self._total_steps, "pid": pid, "host": socket.gethostname()}
        with suppress(CheckpointError):  # nothing depends on it
            if self._lock.is_in_place:
                write_file(self.progress, (json.dumps(told) + "\n").encode())

    def write_config(self, config_yaml: str) -> None:
        """Writes config.yaml."""
        write_file(self.config, config_yaml.encode())

    def forget_after(self, step: int, logged_step: int, eval_step: int) -> None:
        """Removes the rows and checkpoints of what will be done again."""

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
        """Removes all but the newest ``keep`` checkpoints, and what was left of others."""
        recover_all(self.checkpoints)
        if keep is None:
            return
        for old in checkpoint_folders(self.path)[:-keep]:
            remove(old)

    def forget_replaced(self) -> None:
        """Removes the run that this one has replaced."""
        self._replaced.remove()


def checkpoint_folders(path: Path) -> list[Path]:
    """The checkpoints of the run in a folder, oldest first."""
    folder = RunPaths(path).checkpoints
    try:
        entries = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as err:
        raise CheckpointError(f"{folder} cannot be read: {err.strerror or err}") from err
    return sorted((p for p in entries if step_of(p) >= 0), key=step_of)


def step_of(folder: Path) -> int:
    """The step after which a checkpoint was made, by its name; -1 if it is none."""
    word, _, digits = folder.name.partition("-")
    is_step = word == "step" and digits.isdecimal() and digits.isascii()
    return int(digits) if is_step else -1
