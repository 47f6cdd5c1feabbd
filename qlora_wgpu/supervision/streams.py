"""Standard streams that whoever began this process had closed."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path


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
            empty = io.StringIO() if number == 0 else Path(os.devnull).open("w")  # noqa: SIM115
            setattr(sys, name, empty)
