"""Standard streams that whoever began this process had closed, or closes while it runs."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

_OF_CLOSED_PIPES = (errno.EPIPE, errno.EINVAL) if sys.platform == "win32" else (errno.EPIPE,)
"""What a pipe without a reader gives: Windows has no number of its own for it."""


class NamedStream:
    """A standard stream whose errors say that it was this stream, which has no file's name."""

    def __init__(self, stream: TextIO, name: str) -> None:
        """Wraps a stream."""
        self._stream = stream
        self._name = name
        self.has_no_reader = False

    def __getattr__(self, name: str) -> Any:
        """Everything else is the stream's."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text."""
        with self._named():
            return self._stream.write(text)

    def flush(self) -> None:
        """Brings what is written to where it goes."""
        with self._named():
            self._stream.flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as err:
            self.has_no_reader = self.has_no_reader or err.errno in _OF_CLOSED_PIPES
            if err.errno in _OF_CLOSED_PIPES and not isinstance(err, BrokenPipeError):
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE), self._name) from err
            err.filename = self._name
            raise


def replace_closed() -> None:
    """Puts the null device in their place, for the processes that are begun from here, too.

    Else the next file that is opened gets such a stream's number, and what native code prints is
    written into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            nowhere = Path(os.devnull)
            empty = io.StringIO() if number == 0 else nowhere.open("w", encoding="utf-8")
            setattr(sys, name, empty)


def put_nowhere(stream: TextIO) -> None:
    """Drops what waits in a stream's buffer, and all that follows.

    It would fail again when Python ends, with an exit code of its own.
    """
    with suppress(OSError), Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        # OSError: no file of a system's.
        os.dup2(nowhere.fileno(), stream.fileno())


def drop_closed() -> bool:
    """Puts stdout and stderr nowhere if a pipe that they go to has nobody who reads.

    Those that have no room are put there, too: Python would try again as it ends.
    """
    found = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
            closed = _has_no_reader(stream)
        except BrokenPipeError:
            closed = True
        except OSError:  # a disk that is full
            put_nowhere(stream)
            continue
        except ValueError:  # closed by the program itself
            continue
        if closed:
            put_nowhere(stream)
            found = True
    return found


def _has_no_reader(stream: TextIO) -> bool:
    """Whether a stream is a pipe without a reader, where the system tells, or has told."""
    if getattr(stream, "has_no_reader", False):
        return True
    if not hasattr(select, "poll"):  # as on Windows
        return False
    place = select.poll()
    place.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in place.poll(0))
