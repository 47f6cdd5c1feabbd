"""Rows of JSON files, one in memory at a time: a line each, or the items of one list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from qlora_wgpu.data.json_text import checked, parse_json, raw_decode, refusal, skip_space
from qlora_wgpu.data.text_file import TextFile
from qlora_wgpu.errors import DataError
from qlora_wgpu.files import open_file
from qlora_wgpu.limits import MAX_LINE
from qlora_wgpu.visible import quoted

_LIST = "a row must be a JSON object, not a list: a file that is one list must end in .json"
_NEAR_THE_END = 16  # characters: what is cut off within a number, an escape or a word
_FIRST_TRY = 1 << 16  # characters that a row is first looked for in

Rows = Iterator[tuple[str, dict[str, Any]]]


def json_lines(path: Path) -> Rows:
    """Yields where a row stands and the row; empty lines are none.

    Raises:
        DataError: If the file cannot be read, or a line is too long, not UTF-8 or no JSON object.
    """
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
    """Yields where a row stands and the row, from a file that holds one list.

    Raises:
        DataError: If the file cannot be read, is not UTF-8 or holds no list of JSON objects, or a
            row is too long.
    """
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
    """The rows of JSON lines, which many keep in a file called ``.json``; there may be one alone.

    Raises:
        DataError: If there is what is no row, or one object that holds the rows as a list.
    """
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
        """Goes past a character, which must be there.

        Raises:
            DataError: If it is not.
        """
        if self.peek() != character:
            raise self.error(f"Expecting {character!r} delimiter")
        self.take()

    def value(self) -> Any:
        """Goes past a value, which it returns.

        Raises:
            DataError: If there is none, or it is refused.
        """
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
