"""Rows of JSON files, read strictly and part by part: a line each, or the items of one list."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from io import IncrementalNewlineDecoder
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

from qlora_wgpu.errors import DataError
from qlora_wgpu.files import open_file
from qlora_wgpu.limits import MAX_COLUMNS, MAX_DEPTH, MAX_LINE
from qlora_wgpu.visible import quoted

# ---- text files ----------------------------------------------------------------------------------

_CHUNK = 1 << 20  # bytes


class TextFile:
    """A UTF-8 file, with or without a mark at its beginning, whose errors name a line."""

    def __init__(self, path: Path) -> None:
        """Opens the file."""
        self.name = path.name
        self._path = path
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._line_ends = 0
        try:
            self._file = open_file(path)
        except OSError as err:
            raise self._unreadable(err) from err

    def __enter__(self) -> TextFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def read(self) -> str:
        """The next characters; none at the end."""
        text = ""
        while not text:
            raw = self._read_bytes()
            text = self._decoded(raw)
            if not raw:
                break
        self._line_ends += text.count("\n")
        return text

    def _read_bytes(self) -> bytes:
        try:
            return self._file.read(_CHUNK)
        except OSError as err:
            raise self._unreadable(err) from err

    def _decoded(self, raw: bytes) -> str:
        try:
            return self._decode(raw, not raw)
        except UnicodeDecodeError as err:
            line = 1 + self._line_ends + bytes(err.object[: err.start]).count(b"\n")
            raise DataError(
                f"{self.name} line {line} is not UTF-8 text: save the file as UTF-8"
            ) from err

    def _unreadable(self, err: OSError) -> DataError:
        return DataError(f"the data file {self._path} cannot be read: {err.strerror or err}")


def file_parts(path: Path) -> Iterator[str]:
    """All of a file's text in parts of some size, line ends as line feeds.

    So a text has the same tokens whatever system it was written on.
    """
    line_ends = IncrementalNewlineDecoder(None, translate=True)
    with TextFile(path) as file:
        while part := file.read():
            yield line_ends.decode(part)
        yield line_ends.decode("", final=True)


# ---- values --------------------------------------------------------------------------------------

_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Refused(ValueError):
    """JSON that is well formed and yet no value to learn from."""


def parse_json(text: str, first_line: int | None = None) -> Any:
    """The value of a text.

    Args:
        text: All of it is the value.
        first_line: Number of its first line in a file; None for text of one line alone.
    """
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
    """The value that begins at a place of a text, and where it ends; not checked yet."""
    value, end = _decoder().raw_decode(text, begin)
    return value, int(end)


def refusal(err: ValueError | RecursionError) -> DataError:
    """The sentence for what the decoder raises besides a JSONDecodeError."""
    if isinstance(err, _Refused):
        return DataError(str(err))
    if isinstance(err, RecursionError):
        return _too_deep()
    return DataError("a number has too many digits")  # more than Python reads


def checked(value: Any, source: str) -> Any:
    """The value, after a look at what the decoder lets through."""
    # Both looks are needed for few rows, which the text tells at once.
    if source.count("[") + source.count("{") > MAX_DEPTH and _is_deep(value):
        raise _too_deep()
    if "\\u" in source and _has_lone_surrogate(value):
        raise DataError("a text holds a lone surrogate (half a character, such as \\ud83d)")
    return value


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


def skip_space(text: str, begin: int) -> int:
    """The next place of a text that is no white space."""
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
        raise _Refused(f"the key {quoted(twice)} stands twice in one object")
    if len(result) > MAX_COLUMNS:
        raise _Refused(f"an object has {len(result):,} keys, more than {MAX_COLUMNS:,}")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not valid JSON")


def _too_deep() -> DataError:
    return DataError(f"the JSON is nested too deeply: more than {MAX_DEPTH} lists and objects")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [x for part in parts if not isinstance(part, str) for x in part if _holds(x)]
        if not level:
            return False
    return True


def _holds(value: Any) -> bool:
    return isinstance(value, (dict, list))


def _has_lone_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return _SURROGATE.search(value) is not None
    if isinstance(value, dict):
        return any(_has_lone_surrogate(part) for pair in value.items() for part in pair)
    return isinstance(value, list) and any(map(_has_lone_surrogate, value))


# ---- rows ----------------------------------------------------------------------------------------

_LIST = "a row must be a JSON object, not a list: a file that is one list must end in .json"
_NEAR_THE_END = 16  # characters: what is cut off within a number, an escape or a word
_FIRST_TRY = 1 << 16  # characters that a row is first looked for in

Rows = Iterator[tuple[str, dict[str, Any]]]


def json_lines(path: Path) -> Rows:
    """Yields where a row stands and the row; empty lines are none."""
    try:
        with open_file(path) as file:
            for number, raw in enumerate(_lines(file, path.name), start=1):
                where = f"{path.name} line {number}"
                text = _decoded(raw, where, first=number == 1)
                if text.strip():
                    value = _parsed(text, where)
                    if number == 1 and isinstance(value, list):
                        raise DataError(f"{where}: {_LIST}")
                    yield where, _row(value, where)
    except OSError as err:
        raise DataError(f"the data file {path} cannot be read: {err.strerror or err}") from err


def _lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    number = 0
    while raw := file.readline(MAX_LINE + 1):
        number += 1
        if len(raw) > MAX_LINE:
            raise DataError(
                f"{name} line {number} is longer than {MAX_LINE >> 20} MiB: cut it into several "
                "rows, or put a long document into a .txt file"
            )
        yield raw


def _decoded(raw: bytes, where: str, first: bool) -> str:
    try:
        return raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as err:
        raise DataError(f"{where} is not UTF-8 text: save the file as UTF-8") from err


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except DataError as err:
        raise DataError(f"{where}: {err}") from err


def _row(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{where}: a row must be a JSON object, such as {{"text": ...}}')
    return value


def json_list(path: Path) -> Rows:
    """Yields where a row stands and the row, from a file that holds one list."""
    with TextFile(path) as file:
        text = _Window(file)
        if text.peek() != "[":
            yield from _one_after_another(text, path.name)
            return
        text.take()
        number = 0
        while number or text.peek() != "]":
            number += 1
            yield f"{path.name} row {number}", _row(text.value(), f"{path.name} row {number}")
            if text.peek() == "]":
                break
            text.expect(",")
        text.take()
        if text.peek():
            raise text.error("Extra data")


def _one_after_another(text: _Window, name: str) -> Rows:
    """The rows of JSON lines, which many keep in a file called ``.json``; maybe one alone."""
    if not text.peek():
        raise _no_list(name)
    first = text.value()
    if text.peek() not in ("", "{"):
        raise text.error("Extra data")
    if not isinstance(first, dict):
        raise text.error("Extra data") if text.peek() else _no_list(name)
    if not text.peek() and _wraps_rows(first):
        raise DataError(
            f"{name} must hold a list of rows, or one object per line; it holds an object whose "
            f"{quoted(next(iter(first)))} is a list: keep the list alone"
        )
    yield f"{name} row 1", first
    number = 1
    while text.peek():
        number += 1
        yield f"{name} row {number}", _row(text.value(), f"{name} row {number}")


def _wraps_rows(value: dict[str, Any]) -> bool:
    """Whether an object holds one list and nothing more, which is of no messages."""
    inner = next(iter(value.values()), None)
    if len(value) != 1 or not isinstance(inner, list):
        return False
    return not (inner and isinstance(inner[0], dict) and {"role", "from"} & inner[0].keys())


def _no_list(name: str) -> DataError:
    return DataError(f"{name} must hold a list of rows, or one object per line")


class _Window:
    """The part of a text that is looked at, of which what is done with is forgotten."""

    def __init__(self, file: TextFile) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self._lines_before = 0
        self._column = 0  # of the window's first character within its line
        self._ended = False

    def _fill(self, size: int) -> None:
        """Reads until so many characters are there, or all."""
        while not self._ended and len(self._text) - self._at < size:
            more = self._file.read()
            self._ended = not more
            self._forget()
            self._text += more

    def _forget(self) -> None:
        done = self._text[: self._at]
        self._lines_before += done.count("\n")
        self._column = len(done) - done.rfind("\n") - 1 + (0 if "\n" in done else self._column)
        self._text, self._at = self._text[self._at :], 0

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            self._fill(1)
            self._at = skip_space(self._text, self._at)
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]

    def take(self) -> None:
        """Goes past the character that was peeked at."""
        self._at += 1

    def expect(self, character: str) -> None:
        """Goes past a character, which must be there."""
        if self.peek() != character:
            raise self.error(f"Expecting {character!r} delimiter")
        self.take()

    def value(self) -> Any:
        """Goes past a value, which it returns."""
        self.peek()
        size = _FIRST_TRY
        while True:
            self._fill(size)
            try:
                value, end = raw_decode(self._text, self._at)
            except json.JSONDecodeError as err:
                if self._ended or not self._is_cut_off(err):
                    raise self.error(err.msg, err.pos) from err
            except (ValueError, RecursionError) as err:
                raise DataError(f"{self._file.name}: {refusal(err)}") from err
            else:
                if end - self._at > MAX_LINE:
                    raise self._too_long()
                if self._ended or end < len(self._text):
                    return self._past(value, end)
            if size > MAX_LINE:
                raise self._too_long()
            size *= 2

    def _too_long(self) -> DataError:
        return DataError(
            f"{self._file.name}: the row at {self._place(self._at)} is longer than "
            f"{MAX_LINE >> 20} MiB: cut it into several"
        )

    def _past(self, value: Any, end: int) -> Any:
        source = self._text[self._at : end]
        try:
            checked(value, source)
        except DataError as err:
            raise DataError(f"{self._file.name}: {err} at {self._place(self._at)}") from err
        self._at = end
        return value

    def _is_cut_off(self, err: json.JSONDecodeError) -> bool:
        """Whether more text may mend it."""
        near = len(self._text) - err.pos <= _NEAR_THE_END
        return near or err.msg.startswith("Unterminated string")

    def error(self, reason: str, at: int | None = None) -> DataError:
        """The sentence for what is wrong at a place, by default the present one."""
        place = self._place(self._at if at is None else at)
        return DataError(f"{self._file.name}: not valid JSON ({reason} at {place})")

    def _place(self, at: int) -> str:
        before = self._text[:at]
        column = len(before) - before.rfind("\n") + (0 if "\n" in before else self._column)
        return f"line {self._lines_before + before.count(chr(10)) + 1} column {column}"
