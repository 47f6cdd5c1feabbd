"""Reads a Parquet or Arrow file in a child process, with limited memory and only pyarrow.

It runs as a script with the file and its limits as arguments, and writes each row as a line.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

Reading = tuple[list[str], Iterable[Any]]  # columns, and batches of rows
ROW, END, ERROR = b"r", b"e", b"!"  # the first byte of a line
_ROWS_AT_ONCE = 64
_LARGE = 16 << 20  # bytes: of batches converted row by row, of files that are not read twice
_ALWAYS_ALLOWED = 128 << 20  # bytes that the rows of any file may have
_ARROW_FILE = b"ARROW1"
_BUFFER = 1 << 20  # bytes of read-ahead


def main(path: str, memory: int, longest: int, columns: int, expansion: int) -> None:
    """Writes all rows, or the error, to stdout."""
    out = sys.stdout.buffer
    _limit_memory(memory)
    try:
        for row in _rows(path, columns, expansion):
            line = json.dumps(row, default=_placeholder).encode()
            if len(line) > longest:
                raise ValueError(f"a row of {len(line):,} bytes is longer than {longest:,}")
            _write(out, ROW, line)
    except MemoryError:
        return  # without the last line: see qlora_wgpu/data/tables.py
    except Exception as err:  # pyarrow's errors have no common base class
        _write(out, ERROR, f"{err}".replace("\n", " ").encode("utf-8", "replace"))
    else:
        _write(out, END, b"")


def _limit_memory(nbytes: int) -> None:
    # Windows has no such limit.
    with suppress(ImportError, ValueError, OSError):
        resource = importlib.import_module("resource")
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))


def _rows(path: str, columns: int, expansion: int) -> Iterator[dict[str, Any]]:
    arrow = importlib.import_module("pyarrow")
    arrow.set_memory_pool(arrow.system_memory_pool())  # the other pools allocate more
    arrow.set_cpu_count(1)
    begin = _arrow_reader(arrow, path) if path.lower().endswith(".arrow") else _parquet_reader(path)
    names, batches = begin()
    if len(names) > columns:
        raise ValueError(f"it has {len(names):,} columns, more than {columns:,}")
    if len(set(names)) != len(names):
        raise ValueError("two columns have the same name")
    size = Path(path).stat().st_size
    if size < _LARGE:  # a quick check before the first row is used
        _check_expansion(batches, max(expansion * size, _ALWAYS_ALLOWED))
        _, batches = begin()
    for batch in batches:
        if batch.nbytes < _LARGE:
            yield from batch.to_pylist()
        else:
            rows = range(batch.num_rows)
            yield from ({n: batch.column(n)[i].as_py() for n in names} for i in rows)


def _parquet_reader(path: str) -> Callable[[], Reading]:
    parquet = importlib.import_module("pyarrow.parquet")
    file = parquet.ParquetFile(path, buffer_size=_BUFFER)
    batches = partial(file.iter_batches, batch_size=_ROWS_AT_ONCE, use_threads=False)
    return lambda: (file.schema_arrow.names, batches())


def _arrow_reader(arrow: Any, path: str) -> Callable[[], Reading]:
    """For a stream, as ``datasets`` writes them, or a file (Feather)."""
    ipc = importlib.import_module("pyarrow.ipc")

    def begin() -> Reading:
        source = arrow.OSFile(path, "rb")
        is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
        source.seek(0)
        if not is_file:
            stream = ipc.open_stream(source)
            return stream.schema.names, stream
        file = ipc.open_file(source)
        return file.schema.names, map(file.get_batch, range(file.num_record_batches))

    return begin


def _check_expansion(batches: Iterable[Any], limit: int) -> None:
    total = 0
    for batch in batches:
        total += batch.nbytes
        if total > limit:
            raise ValueError(f"its rows expand to more than {limit:,} bytes, a suspicious ratio")


def _placeholder(value: object) -> dict[str, str]:
    """Replaces a value that JSON does not have, such as bytes or a date."""
    return {"type": type(value).__name__}


def _write(out: BinaryIO, kind: bytes, line: bytes) -> None:
    out.write(kind + line + b"\n")
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]))
