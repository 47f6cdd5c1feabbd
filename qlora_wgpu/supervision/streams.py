"""Standard streams that whoever began this process had closed, or closes while it runs."""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO


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

    Returns:
        Whether one of them had.
    """
    found = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
            closed = _has_no_reader(stream)
        except BrokenPipeError:
            closed = True
        except (OSError, ValueError):  # a disk that is full; no file; closed by the program itself
            continue
        if closed:
            put_nowhere(stream)
            found = True
    return found


def _has_no_reader(stream: TextIO) -> bool:
    """Whether a stream is a pipe without a reader, where the system tells."""
    if not hasattr(select, "poll"):  # as on Windows
        return False
    place = select.poll()
    place.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in place.poll(0))
