"""Whether something is there, as pathlib's methods told before Python 3.14.

Since then they call missing what cannot be looked at, too: a folder without permission, a disk that
fails, a name that is too long. Here that is an error, so that no run is overwritten that is there,
and no folder's path is asked of the hub.
"""

from __future__ import annotations

import errno
import stat
from pathlib import Path

_MISSING = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP))
# A drive without a disk, a name that cannot be one, a link that leads nowhere.
_MISSING_ON_WINDOWS = frozenset((21, 123, 1921))


def exists(path: Path) -> bool:
    """Whether a path leads to anything, through links, too; OSError where that cannot be told."""
    return _mode(path) is not None


def is_dir(path: Path) -> bool:
    """Whether a path leads to a folder; errors as in ``exists``."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_file(path: Path) -> bool:
    """Whether a path leads to a regular file; errors as in ``exists``."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_there(path: Path) -> bool:
    """Whether a folder has such an entry, links to nothing included; errors as in ``exists``.

    An entry that is there but cannot be read is never passed over as if it were missing.
    """
    return _mode(path, follow_links=False) is not None


def _mode(path: Path, *, follow_links: bool = True) -> int | None:
    try:
        return path.stat(follow_symlinks=follow_links).st_mode
    except ValueError:  # a NUL in it
        return None
    except OSError as err:
        of_windows = getattr(err, "winerror", None)
        if err.errno in _MISSING or of_windows in _MISSING_ON_WINDOWS:
            return None
        raise


def broken_link(path: Path) -> str | None:
    """What a path is called that is a link to nothing, or to itself; None for any other."""
    if exists(path) or not is_there(path):
        return None
    return f"it is a link to {path.readlink()}, which leads nowhere"
