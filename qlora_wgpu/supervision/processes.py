"""Which processes there are, and what this one may have."""

from __future__ import annotations

import os
import sys

import psutil


def own_number() -> int:
    """This process's number."""
    return os.getpid()


def is_running(number: int) -> bool:
    """Whether there is a process of this number, whoever's it is."""
    try:
        return bool(psutil.pid_exists(number))
    except OverflowError:  # more than any system numbers
        return False


def memory_limit() -> int | None:
    """Bytes of address space that this process and those that it begins may have; None for any."""
    if sys.platform == "win32":
        return None
    import resource  # which Windows has not

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit
