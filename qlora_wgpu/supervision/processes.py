"""Which processes there are, and what this one may have."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
MORE_MEMORY = "raise that limit, or lift it with ulimit -v unlimited"
_NO_LIMIT = 1 << 60  # the first version of control groups has a number for it


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


def address_space() -> str | None:
    """``memory_limit`` in words; None for any."""
    limit = memory_limit()
    if limit is None:
        return None
    return f"no more than {limit / 2**20:,.0f} MiB of address space (ulimit -v)"


def container_limit() -> int | None:
    """Bytes of memory that this process's control groups may have; None for any, or if not told."""
    try:
        lines = _GROUPS.read_text("utf-8").splitlines()
    except (OSError, ValueError):  # no Linux
        return None
    limits = []
    for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if kinds and "memory" not in kinds.split(","):
            continue
        root, name = (_ROOT / "memory", "memory.limit_in_bytes") if kinds else (_ROOT, "memory.max")
        place = PurePosixPath(path.lstrip("/"))
        for group in (place, *place.parents):
            with suppress(OSError, ValueError):  # the root has none, and a limit may be "max"
                limits.append(int((root / group / name).read_text("ascii")))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)
