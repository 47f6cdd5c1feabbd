"""Reading data files strictly: every row is what it seems, or an error names its line."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from qlora_wgpu.data.tables import csv_rows, parquet_rows
from qlora_wgpu.errors import DataError
from qlora_wgpu.files import open_file

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
KINDS = "a .jsonl, .json, .csv, .parquet or .txt file"

_SURROGATE = re.compile("[\ud800-\udfff]")


def check_file(path: Path) -> str:
    """Makes sure that a data file is there and can be read.

    Returns:
        Its suffix in small letters: one of ``SUFFIXES``.

    Raises:
        DataError: If the file is missing, empty, a folder or of an unknown kind.
    """
    try:
        if path.is_dir():
            raise DataError(f"{path} is a folder, not a data file")
        if not path.exists():
            raise DataError(f"the data file {path} does not exist{_near_name(path)}")
        size = path.stat().st_size
    except (OSError, ValueError) as err:
        raise DataError(f"the data file {str(path)[:200]!r} cannot be read: {err}") from err
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"the data file {path} must end in {', '.join(SUFFIXES[:-1])} or .txt")
    if size == 0:
        raise DataError(f"the data file {path} is empty")
    return suffix


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file.

    Yields:
        Where the row stands, such as ``"train.jsonl line 17"``, and the row.

    Raises:
        DataError: If a row is no JSON object, is not UTF-8, or holds NaN, a key twice or a lone
            surrogate.
    """
    readers = {".jsonl": _json_lines, ".csv": csv_rows, ".parquet": parquet_rows}
    return readers.get(path.suffix.lower(), _json_list)(path)


def data_files(path: Path) -> list[Path]:
    """The data files that a path names: itself, or all of a folder, by name.

    Raises:
        DataError: If one cannot be read, or the folder holds none.
    """
    if not path.is_dir():
        check_file(path)
        return [path]
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    files = [p for p in files if not any(q.startswith(".") for q in p.relative_to(path).parts)]
    if not files:
        raise DataError(f"the folder {path} holds no data file: put {KINDS} there")
    texts = [p for p in files if p.suffix.lower() == ".txt"]
    if texts and len(texts) < len(files):
        raise DataError(
            f"the folder {path} holds both text files and files of rows ({texts[0].name}, "
            f"{next(p for p in files if p not in texts).name}): give each a folder of its own"
        )
    for file in files:
        check_file(file)
    return files


def read_text(path: Path) -> str:
    """The whole of a text file, line ends as they are.

    Raises:
        DataError: If it is not UTF-8 or holds nothing but white space.
    """
    text = _decode(_read_bytes(path), path.name, first_line=1)
    if not text.strip():
        raise DataError(f"{path.name} holds no text")
    return text


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with open_file(path) as file:
            for number, raw in enumerate(file, start=1):
                where = f"{path.name} line {number}"
                text = _decode(raw, path.name, first_line=number)
                if not text.strip():
                    continue
                value = _parse(text, where, in_one_line=True)
                if not isinstance(value, dict):
                    raise DataError(
                        f'{where}: a row must be a JSON object, such as {{"text": ...}}'
                    )
                yield where, value
    except OSError as err:
        raise DataError(f"the data file {path} cannot be read: {err.strerror or err}") from err


def _json_list(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    value = _parse(_decode(_read_bytes(path), path.name, first_line=1), path.name)
    if not isinstance(value, list):
        raise DataError(
            f"{path.name} must hold a list of rows: one object per line is a .jsonl file"
        )
    for number, row in enumerate(value, start=1):
        where = f"{path.name} row {number}"
        if not isinstance(row, dict):
            raise DataError(f'{where}: a row must be a JSON object, such as {{"text": ...}}')
        yield where, row


def _read_bytes(path: Path) -> bytes:
    try:
        with open_file(path) as file:
            return file.read()
    except OSError as err:
        raise DataError(f"the data file {path} cannot be read: {err.strerror or err}") from err


def _decode(raw: bytes, name: str, first_line: int) -> str:
    try:
        return raw.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as err:
        line = first_line + raw[: err.start].count(b"\n")
        raise DataError(f"{name} line {line} is not UTF-8 text: save the file as UTF-8") from err


class _Refused(ValueError):
    pass


def _parse(text: str, where: str, in_one_line: bool = False) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as err:
        place = f"column {err.colno}" if in_one_line else f"line {err.lineno} column {err.colno}"
        raise DataError(f"{where}: not valid JSON ({err.msg} at {place})") from err
    except _Refused as err:
        raise DataError(f"{where}: {err}") from err
    except RecursionError as err:
        raise DataError(f"{where}: the JSON is nested too deeply") from err
    except ValueError as err:  # an integer of more digits than Python reads
        raise DataError(f"{where}: a number has too many digits") from err
    # Only an escape can bring half a character into decoded text, so most rows need no walk.
    if "\\u" in text and _has_lone_surrogate(value):
        raise DataError(
            f"{where}: a text holds a lone surrogate (half a character, such as \\ud83d)"
        )
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Refused(f"the key '{twice}' stands twice in one object")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not valid JSON")


def _has_lone_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return _SURROGATE.search(value) is not None
    if isinstance(value, dict):
        return any(_has_lone_surrogate(part) for pair in value.items() for part in pair)
    return isinstance(value, list) and any(map(_has_lone_surrogate, value))


def _near_name(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return f": there is no folder {path.parent}"
    near = difflib.get_close_matches(path.name, names, n=1) or [
        name for name in names if Path(name).stem == path.stem and Path(name).suffix in SUFFIXES
    ]
    return f": did you mean {near[0]}?" if near else ""
