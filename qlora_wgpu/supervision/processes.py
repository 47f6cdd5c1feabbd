"""Which processes there are, how one ended, and what a container leaves them of memory.

Of both versions; a group is limited by those around it, too.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

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


_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # the first version has a number for it


def container_limit() -> int | None:
    """Bytes that this process's groups may have; None for any, or if not told."""
    return min((limit for _, limit, _ in _limited()), default=None)


def container_room() -> int | None:
    """Bytes that its groups have left; None without a limit.

    Pages of files, such as mapped weights, do not count: they give way to whatever needs memory.
    """
    rooms = []
    for folder, limit, is_first in _limited():
        used = "memory.usage_in_bytes" if is_first else "memory.current"
        total = "total_" if is_first else ""  # of the groups within, too
        with suppress(OSError, ValueError):
            kinds = (folder / "memory.stat").read_text("ascii").splitlines()
            rows = dict(line.split(" ", 1) for line in kinds)
            files = sum(int(rows.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))
            rooms.append(max(limit - int((folder / used).read_text("ascii")) + files, 0))
    return min(rooms, default=None)


def _limited() -> Iterator[tuple[Path, int, bool]]:
    """Yields folder and limit of each group that has one, and whether it is of version 1."""
    try:
        lines = _GROUPS.read_text("utf-8").splitlines()
    except (OSError, ValueError):  # no Linux
        return
    for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if kinds and "memory" not in kinds.split(","):
            continue
        root, name = (_ROOT / "memory", "memory.limit_in_bytes") if kinds else (_ROOT, "memory.max")
        place = PurePosixPath(path.lstrip("/"))
        for group in (place, *place.parents):
            with suppress(OSError, ValueError):  # the root has none, and a limit may be "max"
                limit = int((root / group / name).read_text("ascii"))
                if limit < _NO_LIMIT:
                    yield root / group, limit, bool(kinds)
