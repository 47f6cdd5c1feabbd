"""Processes: how one ended, which ones run, signals, and limits of memory (ulimit, cgroups)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

# ---- how a process ended -------------------------------------------------------------------------

HUNG = 76  # exit code: the driver did not respond in time
RESTART = 77  # exit code: a worker lost its scheduler, or exceeded its memory limit

_STOPS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL")
_WINDOWS_ABORT = 3
_WINDOWS_EXCEPTIONS = 0x8000_0000  # NTSTATUS codes begin here


def signal_name(code: int) -> str | None:
    """The signal that ended a process; None if none did."""
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def crash_name(code: int, *, windows: bool) -> str | None:
    """The signal or exception that a process crashed with; None if it exited or was stopped."""
    name = signal_name(code)
    if name is not None:
        return None if name in _STOPS else name
    if windows and (code == _WINDOWS_ABORT or code >= _WINDOWS_EXCEPTIONS):
        return f"exception {code:#x}"
    return None


# ---- processes and their limits ------------------------------------------------------------------

MORE_MEMORY = "raise that limit, or remove it with ulimit -v unlimited"


def own_number() -> int:
    """This process's id."""
    return os.getpid()


def is_running(number: int) -> bool:
    """Whether a process with this id exists, of any user."""
    try:
        import psutil

        return bool(psutil.pid_exists(number))
    except OverflowError:  # no process id is so large
        return False


def memory_limit() -> int | None:
    """Limit of the address space of this process and its children, in bytes; None if unlimited."""
    if sys.platform == "win32":
        return None
    import resource  # not on Windows

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def address_space() -> str | None:
    """``memory_limit`` as text; None if unlimited."""
    limit = memory_limit()
    if limit is None:
        return None
    return f"address space limited to {limit / 2**20:,.0f} MiB (ulimit -v)"


# ---- signals -------------------------------------------------------------------------------------

DEBOUNCE_SECONDS = 1.0
"""Signals within this time count once: they are sent to a process and to its whole group."""

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def block_signals() -> Iterator[None]:
    """Blocks signals; a process that is started within inherits that, until ``unblock_signals``.

    Python would show a traceback for one that comes while it starts.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_pending(number: int) -> bool:
    """Whether a signal has come while it was blocked."""
    return hasattr(signal, "sigpending") and number in signal.sigpending()


def unblock_signals() -> None:
    """Delivers the signals that came while this process was started."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


# ---- cgroups, of both versions -------------------------------------------------------------------

_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # version 1 reports a larger number if there is none


def container_limit() -> int | None:
    """The lowest memory limit of this process's groups, in bytes; None if there is none."""
    return min((limit for _, limit, _ in _limited()), default=None)


def container_room() -> int | None:
    """Bytes left below those limits; None if there is none.

    Pages of files, such as mapped weights, are not counted: the kernel can drop them.
    """
    rooms = []
    for folder, limit, is_first in _limited():
        used = "memory.usage_in_bytes" if is_first else "memory.current"
        total = "total_" if is_first else ""  # with the groups inside
        with suppress(OSError, ValueError):
            kinds = (folder / "memory.stat").read_text("ascii").splitlines()
            rows = dict(line.split(" ", 1) for line in kinds)
            files = sum(int(rows.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))
            rooms.append(max(limit - int((folder / used).read_text("ascii")) + files, 0))
    return min(rooms, default=None)


def _limited() -> Iterator[tuple[Path, int, bool]]:
    """Folder and limit of each group, its parents included, and whether it is version 1."""
    try:
        lines = _GROUPS.read_text("utf-8").splitlines()
    except (OSError, ValueError):  # not Linux
        return
    for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if kinds and "memory" not in kinds.split(","):
            continue
        root, name = (_ROOT / "memory", "memory.limit_in_bytes") if kinds else (_ROOT, "memory.max")
        place = PurePosixPath(path.lstrip("/"))
        for group in (place, *place.parents):
            with suppress(OSError, ValueError):  # the root has no file, and a limit may be "max"
                limit = int((root / group / name).read_text("ascii"))
                if limit < _NO_LIMIT:
                    yield root / group, limit, bool(kinds)
