"""Signals that ask a process to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SAME_WISH = 1.0
"""Seconds within which several are one wish, sent to a process and to its whole group."""

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held_back() -> Iterator[None]:
    """Has signals wait for its end; a process that is begun within has them wait on.

    Python has no handler of ours while it starts, and would show a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_waiting(number: int) -> bool:
    """Whether a signal has come while it was held back."""
    return hasattr(signal, "sigpending") and number in signal.sigpending()


def let_through() -> None:
    """Takes the signals that came while this process was begun."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
