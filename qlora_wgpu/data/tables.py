"""Rows of CSV, Parquet and Arrow files."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, TextIO

from qlora_wgpu.data import parquet_child
from qlora_wgpu.data.json_rows import checked
from qlora_wgpu.data.messages import without_nulls
from qlora_wgpu.errors import DataError, install_command
from qlora_wgpu.files import open_file
from qlora_wgpu.limits import MAX_COLUMNS, MAX_EXPANSION, MAX_LINE, MAX_TABLE_MEMORY
from qlora_wgpu.visible import one_line

_LONGEST_REASON = 300  # characters of pyarrow's message


# ---- CSV -----------------------------------------------------------------------------------------


def csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each row after its location; the first line names the columns.

    The delimiter is a comma, or a semicolon or tab if the first line has no comma. A first column
    without a name is the index that pandas writes, and is ignored.
    """
    csv.field_size_limit(MAX_LINE)
    try:
        with TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
            first = file.readline(MAX_LINE)
            file.seek(0)
            delimiter = next((mark for mark in ",;\t" if mark in first), ",")
            lines = _RecordLines(file, path.name)
            reader = csv.reader(lines, strict=True, delimiter=delimiter)
            names = next(reader, [])
            indexed = len(names) > 1 and not names[0]
            _check_columns(names[indexed:], path.name)
            lines.begin()
            for cells in reader:
                where = f"{path.name} line {reader.line_num}"
                lines.begin()
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise DataError(
                        f"{where}: expected {_counted(len(names), 'cell')} as in the first line, "
                        f"got {len(cells):,}"
                    )
                yield where, dict(zip(names[indexed:], cells[indexed:], strict=True))
    except UnicodeDecodeError as err:
        raise DataError(f"{path.name} is not UTF-8 text: save the file as UTF-8") from err
    except csv.Error as err:
        raise DataError(f"{path.name} line {reader.line_num}: not valid CSV ({err})") from err
    except OSError as err:
        raise DataError(f"cannot read the data file {path}: {err.strerror or err}") from err


class _RecordLines:
    """The lines of a file, with a maximum number of characters per record."""

    def __init__(self, file: TextIO, name: str) -> None:
        self._file = file
        self._name = name
        self._first = self._line = 1
        self._left = MAX_LINE

    def begin(self) -> None:
        """Starts another record at the next line."""
        self._first, self._left = self._line, MAX_LINE

    def __iter__(self) -> _RecordLines:
        return self

    def __next__(self) -> str:
        line = self._file.readline(self._left + 1)
        if len(line) > self._left:
            raise DataError(
                f"{self._name}: the row that begins in line {self._first} is longer than "
                f"{MAX_LINE >> 20} MiB: is a closing quote missing?"
            )
        if not line:
            raise StopIteration
        self._left -= len(line)
        self._line += 1
        return line


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _check_columns(names: list[str], file: str) -> None:
    if len(names) > MAX_COLUMNS:
        raise DataError(f"{file}: it has {len(names):,} columns, more than {MAX_COLUMNS:,}")
    if len(set(names)) != len(names) or not all(names):
        raise DataError(f"{file}: the first line must name every column exactly once")


# ---- Parquet and Arrow ---------------------------------------------------------------------------


def table_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each row of a Parquet or Arrow file after its location.

    A child process reads the file: a few bytes can expand to gigabytes, and pyarrow may abort the
    process on a damaged file.
    """
    kind = "an Arrow" if path.suffix.lower() == ".arrow" else "a Parquet"
    if importlib.util.find_spec("pyarrow") is None or not _has_parquet():
        raise DataError(
            f"{path.name}: {kind.split()[1]} files require pyarrow: {install_command('parquet')}"
        )
    limits = (MAX_TABLE_MEMORY, MAX_LINE, MAX_COLUMNS, MAX_EXPANSION)
    # Without -P, modules could be imported from the script's folder.
    command = [sys.executable, "-P", parquet_child.__file__, str(path), *map(str, limits)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        try:
            assert child.stdout is not None
            yield from _rows_of(child.stdout, path.name, kind)
        finally:
            child.kill()


def _has_parquet() -> bool:
    try:
        return importlib.util.find_spec("pyarrow.parquet") is not None
    except ValueError:  # it is installed but broken
        return False


def _rows_of(lines: IO[bytes], name: str, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    while line := lines.readline():
        mark, text = line[:1], line[1:].decode("utf-8")
        if mark == parquet_child.END:
            return
        if mark == parquet_child.ERROR:
            reason = one_line(text.strip())[:_LONGEST_REASON]
            raise DataError(f"cannot read {name} as {kind} file: {reason}")
        number += 1
        where = f"{name} row {number}"
        try:
            row = checked(json.loads(text), text)
            yield where, {key: without_nulls(value) for key, value in row.items()}
        except RecursionError as err:
            raise DataError(f"{where} is nested too deeply") from err
        except DataError as err:
            raise DataError(f"{where}: {err}") from err
    raise DataError(
        f"cannot read {name} beyond row {number:,}: it is damaged, or its rows take more than "
        f"{MAX_TABLE_MEMORY >> 20} MiB of memory"
    )
