"""Reading untrusted files within limits, and checking whether they exist.

A folder may have a named pipe, which would block forever, a device such as /dev/zero, which has no
end, or a file that is far too large. Links are followed, since the caches of the Hugging Face Hub
consist of them. Every problem is an ``OSError`` whose ``strerror`` ends the caller's sentence.

Unlike pathlib, ``exists`` and the others raise where they cannot tell, such as for a folder without
permission or a failing disk, so that no run is overwritten, and no path is looked up on the Hub.
"""

from __future__ import annotations

import codecs
import errno
import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path

# Neither blocks on a pipe, nor makes a terminal the one of this process
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_BINARY"))

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""Byte order marks of UTF-16, as PowerShell's ``>`` writes it; UTF-8 never starts with them."""

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
    """Opens a regular file, or a link to one, in binary mode; an OSError for anything else."""
    _check_regular(path, os.stat(path))  # noqa: PTH116 (opening a device can have effects)
    descriptor = os.open(path, _FLAGS)
    try:
        _check_regular(path, os.fstat(descriptor))  # it may have been replaced meanwhile
        return BufferedReader(FileIO(descriptor, "rb"), BUFFER_BYTES)
    except BaseException:
        os.close(descriptor)
        raise


def file_bytes(path: str | os.PathLike[str], maximum: int) -> bytes:
    """The bytes of a regular file of at most ``maximum`` bytes, even if it grows meanwhile."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1) if size <= maximum else b""
        if size < len(content) <= maximum:  # it grows; a read allocates all it asks for
            content += file.read(maximum + 1 - len(content))
    if max(size, len(content)) > maximum:
        reason = f"it is too large: such a file may have at most {maximum:,} bytes"
        raise OSError(errno.EFBIG, reason, str(path))
    return content


def file_text(path: str | os.PathLike[str], maximum: int, encoding: str = "utf-8") -> str:
    """The text of a file as by ``file_bytes``, with line feeds; may raise a UnicodeDecodeError."""
    return file_bytes(path, maximum).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def _check_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        reason = f"it is {_KINDS.get(kind, 'something else')}, not a regular file"
        raise OSError(errno.EINVAL, reason, str(path))


_MISSING = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP))
# A drive without a disk, an invalid name, a broken link
_MISSING_ON_WINDOWS = frozenset((21, 123, 1921))


def exists(path: Path) -> bool:
    """Whether a path exists, following links; an OSError if that cannot be determined."""
    return _mode(path) is not None


def is_dir(path: Path) -> bool:
    """Whether a path is a folder; errors as in ``exists``."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_file(path: Path) -> bool:
    """Whether a path is a regular file; errors as in ``exists``."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_there(path: Path) -> bool:
    """Whether a folder has this entry, broken links included; errors as in ``exists``."""
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
    """The problem with a path that is a broken link; None for any other."""
    if exists(path) or not is_there(path):
        return None
    return f"it is a broken link to {path.readlink()}"
