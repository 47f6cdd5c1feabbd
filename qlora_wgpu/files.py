"""Files from outside: whether they are there, and what they hold, within limits.

A folder from outside may hold a named pipe, which would block for ever, a device such as
/dev/zero, which has no end, or a file that is far larger than what it is called. Links are
followed: the caches of the Hugging Face hub consist of them. Whatever is wrong is an ``OSError``
whose ``strerror`` ends the caller's sentence.

Since then they call missing what cannot be looked at, too: a folder without permission, a disk that
fails, a name that is too long. Here that is an error, so that no run is overwritten that is there,
and no folder's path is asked of the hub.
"""

from __future__ import annotations

import codecs
import errno
import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path

# Without waiting for somebody to write, without becoming the terminal of this process.
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_BINARY"))

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""How text in UTF-16 begins, as PowerShell's ``>`` writes it; UTF-8 never begins so."""

LFS_PREFIX = b"version https://git-lfs"
"""The start of a Git LFS pointer, in place of the file."""

BUFFER_BYTES = 8192  # Python 3.14 would take 128 KiB for each open file

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: str | os.PathLike[str]) -> BufferedReader:
    """Opens a regular file, or a link to one, for reading bytes.

    Raises:
        OSError: If there is none, it may not be read, or it is something else.
    """
    _check_regular(path, os.stat(path))  # noqa: PTH116 (opening a device may already do something)
    descriptor = os.open(path, _FLAGS)
    try:
        _check_regular(path, os.fstat(descriptor))  # it may have been replaced just now
        return BufferedReader(FileIO(descriptor, "rb"), BUFFER_BYTES)
    except BaseException:
        os.close(descriptor)
        raise


def file_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """The whole of a file, which may grow meanwhile.

    Args:
        path: A regular file, or a link to one.
        most: Bytes that it may have.

    Raises:
        OSError: If it cannot be read or is larger.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= most else b""
        if size < len(content) <= most:  # it grows; a read takes memory for all it asks for
            content += file.read(most + 1 - len(content))
    if max(size, len(content)) > most:
        reason = f"it is too large: such a file may have {most:,} bytes"
        raise OSError(errno.EFBIG, reason, str(path))
    return content


def file_text(path: str | os.PathLike[str], most: int, encoding: str = "utf-8") -> str:
    """The text of a file, line ends as line feeds; arguments as for ``file_bytes``.

    Raises:
        OSError: If it cannot be read or is larger.
        UnicodeDecodeError: If it is not in this encoding.
    """
    return file_bytes(path, most).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def _check_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        reason = f"it is {_KINDS.get(kind, 'something else')}, not a regular file"
        raise OSError(errno.EINVAL, reason, str(path))


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
