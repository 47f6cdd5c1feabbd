"""How a supervised process ended, by its exit code."""

from __future__ import annotations

import signal

ERROR = 2  # of every failure that a sentence explains
LOST = 75  # the device was lost, and the process could still say so
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
