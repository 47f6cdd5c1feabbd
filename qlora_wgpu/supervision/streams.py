"""The standard streams, where they may be closed, broken, full or not in UTF-8."""

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

# Windows has no error of its own for a pipe that nobody reads
_BROKEN_PIPE = (errno.EPIPE, errno.EINVAL) if sys.platform == "win32" else (errno.EPIPE,)


class Output:
    """Stdout or stderr: a broken pipe ends the command quietly, a full disk is an error.

    With ``ignore_broken_pipe`` the command continues when nobody reads, and nothing more is
    written. With ``ignore_errors`` a full disk does not end it either; for stdout, there is a
    warning, since the folder of a run has all that is shown.
    """

    def __init__(
        self, stream: TextIO, *, ignore_broken_pipe: bool = False, ignore_errors: bool = False
    ) -> None:
        self._stream = _unwrapped(stream)
        self._ignore_broken_pipe, self._ignore_errors = ignore_broken_pipe, ignore_errors
        self._is_over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, or drops it."""
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, or does nothing."""
        self._try(self._stream.flush)

    def _try(self, action: Callable[..., object], *text: str) -> None:
        if self._is_over:
            return
        try:
            action(*text)
        except OSError as err:
            is_broken_pipe = err.errno in _BROKEN_PIPE
            if not (is_broken_pipe or self._ignore_errors):
                raise QLoRAError(f"cannot write to the standard output: {reason(err)}") from err
            self._is_over = True
            redirect_to_devnull(self._stream)
            if is_broken_pipe and not self._ignore_broken_pipe:
                sys.exit(0)  # the reader, such as `head`, has seen enough
            if self._ignore_errors and self._stream is not _unwrapped(sys.stderr):
                stderr = best_effort(sys.stderr)
                stderr.write(f"warning: no more output ({reason(err)}); the run continues\n")
                stderr.flush()


def _unwrapped(stream: TextIO) -> TextIO:
    return stream._stream if isinstance(stream, Output) else stream


def best_effort(stream: TextIO) -> TextIO:
    """Stderr without errors of its own, which nobody would see."""
    return cast(TextIO, Output(stream, ignore_broken_pipe=True, ignore_errors=True))


def replace_closed() -> None:
    """Replaces closed streams by the null device, also for child processes.

    Otherwise the next file that is opened would get the stream's descriptor, and native code would
    print into it.
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
    """Wraps the streams for a command: output escapes characters that its encoding lacks.

    Input is strict: the C locale would pass surrogates on.
    """
    escaped = "backslashreplace"
    for name, errors in {"stdout": escaped, "stderr": escaped, "stdin": "strict"}.items():
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)  # only files have it
        if reconfigure is not None:
            reconfigure(errors=errors)
    sys.stdout = cast(TextIO, Output(sys.stdout))
    sys.stderr = best_effort(sys.stderr)


def drop_unwritable() -> None:
    """Drops buffered output that cannot be written: Python would exit with a code of its own."""
    for stream in map(_unwrapped, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            redirect_to_devnull(stream)
        except ValueError:  # closed by the program itself
            continue


def redirect_to_devnull(stream: TextIO) -> None:
    """Drops a stream's buffer and all later output."""
    with suppress(OSError), Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        # OSError: the stream has no descriptor.
        os.dup2(nowhere.fileno(), stream.fileno())
