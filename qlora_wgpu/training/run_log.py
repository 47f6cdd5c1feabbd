"""metrics.jsonl: a row for each logged step and each evaluation."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from qlora_wgpu.checkpoint import append_line, write_file
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.files import file_bytes
from qlora_wgpu.limits import OWN_LOG_BYTES
from qlora_wgpu.training.observers import Row


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
        """Writes nothing yet.

        Args:
            path: metrics.jsonl.
            warn: Told, once, that rows cannot be written.
        """
        self._path = path
        self._warn = warn
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
            with self._path.open("rb+") as file:
                os.fsync(file.fileno())
        except OSError as err:
            self._complain(CheckpointError(f"{self._path} cannot be written: {err.strerror}"))

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
