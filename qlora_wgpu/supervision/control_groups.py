"""What Linux's control groups, such as a container's, leave this process of memory.

Of both versions; a group is limited by those around it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

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
