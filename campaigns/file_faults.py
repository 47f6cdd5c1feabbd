"""Faults at the file operations of this process: an error, a short write, a deed, or its death.

Python's own ways to files are replaced by ones that count every operation below a folder, and at
the n-th of them do what a fault says. Native code that writes by itself is not seen.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FULL = {"open", "write", "fsync", "close", "mkdir"}  # what a full disk refuses
CHANGES = FULL | {"rename", "unlink", "rmdir", "chmod", "utime", "truncate", "link"}
READS = {"read", "list"}
LASTING = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EROFS: CHANGES,
    errno.EIO: CHANGES | READS,
}
_FUNCTIONS = {
    "rename": ("rename", "replace"),
    "unlink": ("unlink", "remove"),
    "rmdir": ("rmdir",),
    "mkdir": ("mkdir",),
    "chmod": ("chmod",),
    "utime": ("utime",),
    "truncate": ("truncate", "ftruncate"),
    "link": ("link", "symlink"),
    "fsync": ("fsync", "fdatasync"),
    "list": ("scandir", "listdir"),
}


@dataclass(frozen=True)
class Fault:
    """What happens at an operation.

    Attributes:
        root: Operations below this folder count.
        at: The operation's number from 1, or 0 for nothing at all.
        act: "kill", "error", "short" (a write takes half of what it is given) or one of ``DEEDS``.
        code: The error's number.
        lasting: Whether what comes later fails, too.
        half: Whether a write takes half of its bytes before the fault.
    """

    root: Path
    at: int = 0
    act: str = "error"
    code: int = errno.EIO
    lasting: bool = False
    half: bool = False

    def __str__(self) -> str:
        name = errno.errorcode[self.code] if self.act == "error" else self.act
        details = [word for word in ("lasting", "half") if getattr(self, word)]
        return " ".join([name, *details, f"at operation {self.at}"])


class Injector:
    """Counts operations and lets the fault happen."""

    def __init__(self, tally: memoryview[int]) -> None:
        """``tally[0]`` counts the operations; nothing happens before ``arm``."""
        self._tally = tally
        self._root = "/no/such/folder"
        self._fault = Fault(Path())

    def arm(self, fault: Fault) -> None:
        """Begins to count below the fault's folder, from zero."""
        self._fault, self._root = fault, os.path.realpath(fault.root)
        self._tally[0] = 0

    def disarm(self) -> None:
        """Lets all operations be; what was counted stays."""
        self._root = "/no/such/folder"

    def counts(self, path: str) -> bool:
        return path.startswith(self._root + os.sep)

    def meet(self, kind: str, path: str) -> bool:
        """Counts an operation, and raises or kills; True if a write is to be a short one."""
        if not self.counts(path):
            return False
        self._tally[0] += 1
        fault, number = self._fault, self._tally[0]
        first = number == fault.at
        if not fault.at or number < fault.at or not (first or fault.lasting):
            return False
        if fault.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.act == "error" and (first or kind in LASTING[fault.code]):
            code = errno.EIO if kind in READS else fault.code
            raise OSError(code, os.strerror(code), path)
        if fault.act in DEEDS:
            root, self._root = self._root, "/no/such/folder"  # what it does is not the run's
            DEEDS[fault.act](Path(path), fault.root / "out")
            self._root = root
        return fault.act == "short"

    def write(self, path: str, data: Any, write: Callable[[Any], int | None]) -> int | None:
        """A write, of which the fault may let half through."""
        view = memoryview(data).cast("B")
        fault = self._fault
        if fault.half and self.counts(path) and self._tally[0] + 1 == fault.at:
            write(view[: len(view) // 2])
        if self.meet("write", path) and len(view) > 1:
            return write(view[: len(view) // 2])
        return write(view)


def install(injector: Injector) -> None:
    """Replaces this process's ways to files, for good."""
    builtins.open = io.open = _opening(injector, io.open)
    os.open = _descriptor_opening(injector, os.open)
    os.write = _descriptor_writing(injector, os.write)
    for kind, names in _FUNCTIONS.items():
        for name in names:
            setattr(os, name, _counted(injector, kind, getattr(os, name)))


def _path_of(file: Any, dir_fd: int | None = None) -> str:
    """Where a path or a descriptor leads; the last name may be a link, and is not followed."""
    if isinstance(file, int):
        return str(Path(f"/proc/self/fd/{file}").readlink())
    folder = Path.cwd() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
    path = folder / os.fsdecode(file)
    return f"{os.path.realpath(path.parent)}/{path.name}"


def _counted(injector: Injector, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        path = args[0] if args else options.get("path", ".")
        dir_fd = options.get("dir_fd", options.get("src_dir_fd"))
        injector.meet(kind, _path_of(path, dir_fd))
        return original(*args, **options)

    return call


def _descriptor_opening(injector: Injector, original: Callable[..., int]) -> Callable[..., int]:
    def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        injector.meet("open" if writes else "read", _path_of(path, dir_fd))
        return original(path, flags, mode, dir_fd=dir_fd)

    return call


def _descriptor_writing(injector: Injector, original: Callable[..., int]) -> Callable[..., Any]:
    def call(fd: int, data: Any) -> int | None:
        return injector.write(_path_of(fd), data, lambda part: original(fd, part))

    return call


def _opening(injector: Injector, original: Callable[..., Any]) -> Callable[..., Any]:
    class File(io.FileIO):
        def write(self, data: Any) -> int | None:  # type: ignore[override]
            return injector.write(_path_of(self.fileno()), data, super().write)

        def close(self) -> None:
            path = "" if self.closed else _path_of(self.fileno())
            super().close()
            injector.meet("close", path)

    def call(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        path = _path_of(file)
        writes = bool(set(mode) & set("wax+"))
        if not injector.counts(path):
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        injector.meet("open" if writes else "read", path)
        if not writes:
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = File(file, mode.replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return binary
        text = io.TextIOWrapper(binary, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode  # type: ignore[misc]
        return text

    return call


def removed(path: Path) -> None:
    """Takes away whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def put_folder(path: Path) -> None:
    """Puts a folder with a file in it where a file is or should be."""
    removed(path)
    (path / "inside").mkdir(parents=True)
    (path / "inside" / "file").write_bytes(b"x")


def put_file(path: Path) -> None:
    """Puts a file where a folder is or should be."""
    removed(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"a file")


# What somebody else may do to the folder in use, by the operation's path and output.dir.
DEEDS: dict[str, Callable[[Path, Path], None]] = {
    "output.dir removed": lambda path, out: removed(out),
    "output.dir is a file": lambda path, out: put_file(out),
    "a file is a folder": lambda path, out: put_folder(path) if not path.is_dir() else None,
    "metrics.jsonl is a folder": lambda path, out: put_folder(out / "metrics.jsonl"),
    "metrics.jsonl removed": lambda path, out: removed(out / "metrics.jsonl"),
    "config.yaml removed": lambda path, out: removed(out / "config.yaml"),
    "checkpoints removed": lambda path, out: removed(out / "checkpoints"),
    "checkpoints is a file": lambda path, out: put_file(out / "checkpoints"),
    "adapter is a file": lambda path, out: put_file(out / "adapter"),
    "best removed": lambda path, out: removed(out / "best"),
}
