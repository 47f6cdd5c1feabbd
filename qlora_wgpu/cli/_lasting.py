"""Output that may fail without ending what it tells of."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from qlora_wgpu.visible import visible


class LastingOutput:
    """Stdout for hours: once a disk is full or a pipe is closed, nothing is written any more.

    A run does not hang on who looks at it: its folder has all that is shown.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._like = stream

    def __getattr__(self, name: str) -> Any:
        """Everything else is the stream's."""
        return getattr(self._like, name)

    def write(self, text: str) -> int:
        """Writes a text, or drops it."""
        if self._stream is not None:
            try:
                return self._stream.write(text)
            except OSError as err:
                self._end(err)
        return len(text)

    def flush(self) -> None:
        """Brings what is written to where it goes."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError as err:
                self._end(err)

    def _end(self, err: OSError) -> None:
        stream, self._stream = self._stream, None
        if stream is sys.__stdout__:
            _put_nowhere(self._like)
        why = visible(err.strerror or str(err))
        try:
            sys.stderr.write(f"warning: nothing more can be shown ({why}): the run goes on\n")
            sys.stderr.flush()
        except OSError:  # it goes the same way
            with suppress(OSError):  # of a stream that is no file
                _put_nowhere(sys.stderr)


def _put_nowhere(stream: TextIO) -> None:
    """What waits in its buffer would fail again when Python ends, with an exit code of its own."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
