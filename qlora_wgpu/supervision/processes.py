"""Which processes there are."""

from __future__ import annotations

import os

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
