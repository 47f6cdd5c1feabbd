"""The standard streams, and what is done where they are closed, broken, full or not in UTF-8."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from qlora_wgpu.errors import QLoRAError, reason

_OF_CLOSED_PIPES = (errno.EPIPE, errno.EINVAL) if sys.platform == "win32" else (errno.EPIPE,)
"""What a pipe without a reader gives: Windows has no number of its own for it."""


class Output:
    """Stdout or stderr: a reader that has gone ends a command quietly, a full disk is an error.

    Where it ``goes_on``, nothing more is written once nobody reads: what a command does, and how
    it ends, does not hang on who looks at it. Where it is ``lasting``, a full disk ends nothing,
    either; of stdout a warning tells, since the folder of a run has all that is shown.
    """

    def __init__(self, stream: TextIO, *, goes_on: bool = False, lasting: bool = False) -> None:
        self._stream = _unwrapped(stream)
        self._goes_on, self._lasting = goes_on, lasting
        self._is_over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, or drops it."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Brings what is written to where it goes."""
        self._try(self._stream.flush)

    def _try(self, action: Callable[..., object], *text: str) -> None:
        if self._is_over:
            return
        try:
            action(*text)
        except OSError as err:
            has_no_reader = err.errno in _OF_CLOSED_PIPES
            if not (has_no_reader or self._lasting):
                raise QLoRAError(
                    f"what is shown cannot be written to the standard output: {reason(err)}"
                ) from err
            self._is_over = True
            redirect_to_devnull(self._stream)
            if has_no_reader and not self._goes_on:
                sys.exit(0)  # whoever read has seen enough, and no more is made
            if self._lasting and self._stream is not _unwrapped(sys.stderr):
                told = all_passed_over(sys.stderr)
                told.write(f"warning: nothing more can be shown ({reason(err)}): the run goes on\n")
                told.flush()


def _unwrapped(stream: TextIO) -> TextIO:
    return stream._stream if isinstance(stream, Output) else stream


def all_passed_over(stream: TextIO) -> TextIO:
    """Stderr, as it is written to by who could tell nobody that it fails."""
    return cast(TextIO, Output(stream, goes_on=True, lasting=True))


def replace_closed() -> None:
    """Puts the null device in place of closed streams, for the processes begun from here, too.

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


def guard_streams() -> None:
    """Makes Python's streams those of a command, which escape what their encoding lacks.

    Stdin takes no other characters: locales of C would pass halves of them on.
    """
    escaped = "backslashreplace"
    for name, errors in {"stdout": escaped, "stderr": escaped, "stdin": "strict"}.items():
        reconfigure = getattr(
            getattr(sys, name), "reconfigure", None
        )  # others than files have none
        if reconfigure is not None:
            reconfigure(errors=errors)
    sys.stdout = cast(TextIO, Output(sys.stdout))
    sys.stderr = all_passed_over(sys.stderr)


def drop_unwritable() -> None:
    """Drops what waits and cannot be written: Python would fail at it, with a code of its own."""
    for stream in map(_unwrapped, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            redirect_to_devnull(stream)
        except ValueError:  # closed by the program itself
            continue


def redirect_to_devnull(stream: TextIO) -> None:
    """Drops what waits in a stream's buffer, and all that follows."""
    with suppress(OSError), Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        # OSError: no file of a system's.
        os.dup2(nowhere.fileno(), stream.fileno())
