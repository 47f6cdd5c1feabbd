"""Rows of CSV and Parquet files."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from qlora_wgpu.errors import DataError
from qlora_wgpu.files import open_file

_LONGEST_CELL = 1 << 27
_ROWS_AT_ONCE = 256


def csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields where a row stands and the row; its first line names the columns.

    Raises:
        DataError: If it is not UTF-8, a line has more or fewer cells than columns, or two columns
            have one name.
    """
    csv.field_size_limit(_LONGEST_CELL)
    try:
        with TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            names = next(reader, [])
            if len(set(names)) != len(names) or not all(names):
                raise DataError(f"{path.name}: its first line must name every column once")
            for cells in reader:
                where = f"{path.name} line {reader.line_num}"
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise DataError(
                        f"{where}: it has {len(cells)} cells, but the first line names "
                        f"{len(names)} columns"
                    )
                yield where, dict(zip(names, cells, strict=True))
    except UnicodeDecodeError as err:
        raise DataError(f"{path.name} is not UTF-8 text: save the file as UTF-8") from err
    except csv.Error as err:
        raise DataError(f"{path.name} line {reader.line_num}: not valid CSV ({err})") from err
    except OSError as err:
        raise DataError(f"the data file {path} cannot be read: {err.strerror or err}") from err


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields where a row stands and the row, a few hundred rows in memory at a time.

    Raises:
        DataError: If the extra ``parquet`` is not installed or the file is damaged.
    """
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(
            f"{path.name}: Parquet files need the extra: pip install 'qlora-wgpu[parquet]'"
        ) from None
    number = 0
    try:
        with open_file(path) as raw, parquet.ParquetFile(raw) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path.name} row {number}", _without_nulls(row)
    except DataError:
        raise
    except Exception as err:  # pyarrow's errors have no common base
        raise DataError(f"{path.name} is no Parquet file that can be read: {err}") from err


def _without_nulls(value: Any) -> Any:
    """A row as JSON lines would have it: a table fills keys that an object lacks with nothing."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
