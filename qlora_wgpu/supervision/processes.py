"""Which processes there are."""

from __future__ import annotations

import ctypes
import os
import sys

_SYNCHRONIZE = 0x0010_0000  # the least that Windows can be asked for


def own_number() -> int:
    """This process's number."""
    return os.getpid()


def is_running(number: int) -> bool:
    """Whether there is a process of this number, whoever's it is."""
    if sys.platform == "win32":  # where signal 0 would be Ctrl-C
        kernel = ctypes.windll.kernel32
        handle = kernel.OpenProcess(_SYNCHRONIZE, False, number)
        if handle:
            kernel.CloseHandle(handle)
        return bool(handle)
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
