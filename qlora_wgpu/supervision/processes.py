"""Which processes there are, how one ended, and the signals that ask it to."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# ---- how a process ended -------------------------------------------------------------------------

HUNG = 76  # the driver did not answer for too long
AGAIN = 77  # a worker whose scheduler went away, or that outgrew its memory: a new one goes on

_STOPS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL")
_WINDOWS_ABORT = 3
_WINDOWS_EXCEPTIONS = 0x8000_0000  # NTSTATUS codes begin here


def signal_name(code: int) -> str | None:
    """The signal that ended a process, if one did."""
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def crash_name(code: int, *, windows: bool) -> str | None:
    """What a process crashed with, or None if it ended by itself or was asked to end."""
    name = signal_name(code)
    if name is not None:
        return None if name in _STOPS else name
    if windows and (code == _WINDOWS_ABORT or code >= _WINDOWS_EXCEPTIONS):
        return f"exception {code:#x}"
    return None


# ---- processes and their limits ------------------------------------------------------------------

MORE_MEMORY = "raise that limit, or lift it with ulimit -v unlimited"


def own_number() -> int:
    """This process's number."""
    return os.getpid()


def is_running(number: int) -> bool:
    """Whether there is a process of this number, whoever's it is."""
    try:
        import psutil

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


def address_space() -> str | None:
    """``memory_limit`` in words; None for any."""
    limit = memory_limit()
    if limit is None:
        return None
    return f"no more than {limit / 2**20:,.0f} MiB of address space (ulimit -v)"


# ---- signals -------------------------------------------------------------------------------------

SAME_WISH = 1.0
"""Seconds within which several are one wish, sent to a process and to its whole group."""

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def block_signals() -> Iterator[None]:
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
