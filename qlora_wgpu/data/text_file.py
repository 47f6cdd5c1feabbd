"""Text files, read part by part: what is in memory is bounded, whatever the file's size."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from io import IncrementalNewlineDecoder
from pathlib import Path
from types import TracebackType

from qlora_wgpu.errors import DataError
from qlora_wgpu.files import open_file

_CHUNK = 1 << 20  # bytes


class TextFile:
    """A UTF-8 file, with or without a mark at its beginning, whose errors name a line."""

    def __init__(self, path: Path) -> None:
        """Opens the file.

        Raises:
            DataError: If it cannot be opened.
        """
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
        """The next characters; none at the end.

        Raises:
            DataError: If the file cannot be read on or is not UTF-8.
        """
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

    Raises:
        DataError: If it cannot be read or is not UTF-8.
    """
    line_ends = IncrementalNewlineDecoder(None, translate=True)
    with TextFile(path) as file:
        while part := file.read():
            yield line_ends.decode(part)
        yield line_ends.decode("", final=True)
