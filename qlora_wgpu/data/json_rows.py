"""Strict JSON, and the rows of JSON Lines files and of JSON files with one list."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from io import IncrementalNewlineDecoder
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from qlora_wgpu.errors import DataError
from qlora_wgpu.files import open_file
from qlora_wgpu.limits import JSON_LIST_BYTES, MAX_COLUMNS, MAX_DEPTH, MAX_LINE
from qlora_wgpu.visible import quoted

# ---- text files ----------------------------------------------------------------------------------

_CHUNK = 1 << 20  # bytes


def file_parts(path: Path) -> Iterator[str]:
    """A file's text in parts, with line ends as line feeds on every system."""
    line_ends = IncrementalNewlineDecoder(None, translate=True)
    for part in _decoded_parts(path):
        yield line_ends.decode(part)
    yield line_ends.decode("", final=True)


def _decoded_parts(path: Path) -> Iterator[str]:
    """A UTF-8 file, with or without a byte order mark; errors name the line."""
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    line, raw = 1, b"\n"
    try:
        with open_file(path) as file:
            while raw:
                raw = file.read(_CHUNK)
                part = decode(raw, not raw)
                line += part.count("\n")
                yield part
    except UnicodeDecodeError as err:
        where = f"{path.name} line {line + bytes(err.object[: err.start]).count(10)}"
        raise DataError(f"{where} is not UTF-8 text: save the file as UTF-8") from err
    except OSError as err:
        raise DataError(f"cannot read the data file {path}: {err.strerror or err}") from err


# ---- values --------------------------------------------------------------------------------------

_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Refused(ValueError):
    """JSON that is well-formed but not supported as data."""


def parse_json(text: str, first_line: int | None = None) -> Any:
    """Parses a text; ``first_line`` is its line number in a file, None for a single line."""
    decoder = _decoder()
    try:
        value, end = decoder.raw_decode(text, skip_space(text, 0))
        end = skip_space(text, end)
        if end != len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except json.JSONDecodeError as err:
        raise DataError(f"not valid JSON ({err.msg} at {_place(err, first_line)})") from err
    except (ValueError, RecursionError) as err:
        raise refusal(err) from err
    return checked(value, text)


def raw_decode(text: str, begin: int) -> tuple[Any, int]:
    """The value at a position of a text, and its end; not checked yet."""
    value, end = _decoder().raw_decode(text, begin)
    return value, int(end)


def refusal(err: ValueError | RecursionError) -> DataError:
    """The error for what the decoder raises other than JSONDecodeError."""
    if isinstance(err, _Refused):
        return DataError(str(err))
    if isinstance(err, RecursionError):
        return _too_deep()
    return DataError("a number has too many digits")  # for Python's int


def checked(value: Any, source: str) -> Any:
    """Refuses deep nesting and lone surrogates, which the decoder accepts."""
    # Few rows need these checks; the source text tells which.
    if source.count("[") + source.count("{") > MAX_DEPTH and _is_deep(value):
        raise _too_deep()
    if "\\u" in source and _has_lone_surrogate(value):
        raise DataError("a string has a lone surrogate (half a character, such as \\ud83d)")
    return value


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


def skip_space(text: str, begin: int) -> int:
    """The next position that is not white space."""
    match = _SPACE.match(text, begin)
    assert match is not None
    return match.end()


def _place(err: json.JSONDecodeError, first_line: int | None) -> str:
    if first_line is None:
        return f"column {err.colno}"
    return f"line {first_line + err.lineno - 1} column {err.colno}"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Refused(f"the key {quoted(twice)} occurs twice in one object")
    if len(result) > MAX_COLUMNS:
        raise _Refused(f"an object has {len(result):,} keys, more than {MAX_COLUMNS:,}")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not valid JSON")


def _too_deep() -> DataError:
    return DataError(f"the JSON is nested too deeply: more than {MAX_DEPTH} lists and objects")


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH + 1):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [x for part in parts for x in part if isinstance(x, (dict, list))]
        if not level:
            return False
    return True


def _has_lone_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return _SURROGATE.search(value) is not None
    if isinstance(value, dict):
        return any(_has_lone_surrogate(part) for pair in value.items() for part in pair)
    return isinstance(value, list) and any(map(_has_lone_surrogate, value))


# ---- rows ----------------------------------------------------------------------------------------

_LIST = "a row must be a JSON object, not a list: rename a file with one list to .json"

Rows = Iterator[tuple[str, dict[str, Any]]]


def json_lines(path: Path) -> Rows:
    """Yields each row after its location; empty lines are skipped."""
    try:
        with open_file(path) as file:
            for number, raw in enumerate(_lines(file, path.name), start=1):
                where = f"{path.name} line {number}"
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                    value = parse_json(text) if text.strip() else None
                except UnicodeDecodeError as err:
                    raise DataError(f"{where} is not UTF-8 text: save the file as UTF-8") from err
                except DataError as err:
                    raise DataError(f"{where}: {err}") from err
                if number == 1 and isinstance(value, list):
                    raise DataError(f"{where}: {_LIST}")
                if text.strip():
                    yield where, _row(value, where)
    except OSError as err:
        raise DataError(f"cannot read the data file {path}: {err.strerror or err}") from err


def _lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    number = 0
    while raw := file.readline(MAX_LINE + 1):
        number += 1
        if len(raw) > MAX_LINE:
            raise DataError(
                f"{name} line {number} is longer than {MAX_LINE >> 20} MiB: split it into several "
                "rows, or put a long document into a .txt file"
            )
        yield raw


def _row(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{where}: a row must be a JSON object, such as {{"text": ...}}')
    return value


def json_list(path: Path) -> Rows:
    """Yields each row of a file with one list after its location."""
    text = _Values(path.name, _whole(path))
    if text.peek() != "[":
        yield from _one_after_another(text, path.name)
        return
    text.expect("[")
    number = 0
    while number or text.peek() != "]":
        number += 1
        yield f"{path.name} row {number}", _row(text.value(), f"{path.name} row {number}")
        if text.peek() == "]":
            break
        text.expect(",")
    text.expect("]")
    if text.peek():
        raise text.error("Extra data")


def _whole(path: Path) -> str:
    parts, left = [], JSON_LIST_BYTES
    for part in _decoded_parts(path):
        left -= len(part)
        if left < 0:
            raise DataError(
                f"{path.name} is larger than {JSON_LIST_BYTES >> 30} GiB, the maximum for .json "
                "files: convert it to JSON Lines (.jsonl), one object per line"
            )
        parts.append(part)
    return "".join(parts)


def _one_after_another(text: _Values, name: str) -> Rows:
    """The rows of JSON Lines in a file named ``.json``."""
    if not text.peek():
        raise _no_list(name)
    first = text.value()
    if text.peek() not in ("", "{"):
        raise text.error("Extra data")
    if not isinstance(first, dict):
        raise text.error("Extra data") if text.peek() else _no_list(name)
    if not text.peek() and _wraps_rows(first):
        raise DataError(
            f"{name} must contain a list of rows, or one object per line, got an object whose "
            f"{quoted(next(iter(first)))} is a list: keep only the list"
        )
    yield f"{name} row 1", first
    number = 1
    while text.peek():
        number += 1
        yield f"{name} row {number}", _row(text.value(), f"{name} row {number}")


def _wraps_rows(value: dict[str, Any]) -> bool:
    inner = next(iter(value.values()), None)
    if len(value) != 1 or not isinstance(inner, list):
        return False
    return not (inner and isinstance(inner[0], dict) and {"role", "from"} & inner[0].keys())


def _no_list(name: str) -> DataError:
    return DataError(f"{name} must contain a list of rows, or one object per line")


class _Values:
    """Reads JSON values one after the other."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._at = 0

    def peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        self._at = skip_space(self._text, self._at)
        return self._text[self._at : self._at + 1]

    def expect(self, character: str) -> None:
        """Skips a required character."""
        if self.peek() != character:
            raise self.error(f"Expecting {character!r} delimiter")
        self._at += 1

    def value(self) -> Any:
        """Reads the next value."""
        self.peek()
        begin = self._at
        try:
            value, self._at = raw_decode(self._text, begin)
        except json.JSONDecodeError as err:
            if err.pos - begin > MAX_LINE:
                raise self._too_long(begin) from err
            raise self.error(err.msg, err.pos) from err
        except (ValueError, RecursionError) as err:
            raise DataError(f"{self._name}: {refusal(err)}") from err
        if self._at - begin > MAX_LINE:
            raise self._too_long(begin)
        try:
            return checked(value, self._text[begin : self._at])
        except DataError as err:
            raise DataError(f"{self._name}: {err} at {self._place(begin)}") from err

    def error(self, reason: str, at: int | None = None) -> DataError:
        """An error at a position, by default the current one."""
        place = self._place(self._at if at is None else at)
        return DataError(f"{self._name}: not valid JSON ({reason} at {place})")

    def _too_long(self, begin: int) -> DataError:
        return DataError(
            f"{self._name}: the row at {self._place(begin)} is longer than "
            f"{MAX_LINE >> 20} MiB: split it into several rows"
        )

    def _place(self, at: int) -> str:
        line_begins = self._text.rfind("\n", 0, at) + 1
        return f"line {self._text.count(chr(10), 0, at) + 1} column {at - line_begins + 1}"
