"""The folder in which this package keeps what it can make again, and which is its user's alone.

What cannot be kept is made anew each time, and what is there counts only where it is whole and the
user's own: no run ends, or computes otherwise, because of a cache.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs

from qlora_wgpu.files import file_text
from qlora_wgpu.limits import OWN_JSON_BYTES

_ASKS_FOR_IT = sys.platform in ("win32", "darwin")  # where not every platformdirs does


def folder_of_this_process(prefix: str) -> Path:
    """A temporary folder that lasts as long as this process, for what no cache keeps."""
    made = tempfile.TemporaryDirectory(prefix=prefix)
    atexit.register(made.cleanup)  # which keeps it till then, and Python from warning of it
    return Path(made.name)


def cache_path(*names: str) -> Path:
    """A path in the operating system's cache folder for this package; nothing is made there.

    On Linux that is ``~/.cache/qlora-wgpu``. ``XDG_CACHE_HOME`` names another on every system.
    """
    if _ASKS_FOR_IT and (chosen := os.environ.get("XDG_CACHE_HOME", "").strip()):
        return Path(chosen, "qlora-wgpu", *names)
    try:
        root = platformdirs.user_cache_dir("qlora-wgpu", appauthor=False)
    except RuntimeError:  # a user without a home folder
        root = "~/.cache/qlora-wgpu"
    return Path(root, *names)


def make_cache_folder(folder: Path) -> None:
    """Makes a folder of the cache. Nobody else may look into the cache: it holds users' data.

    Raises:
        OSError: If it cannot be made, or is not the user's.
    """
    root = cache_path()
    if not root.is_absolute():  # where there is no home folder
        raise OSError("it is no absolute path")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(root)
    with suppress(OSError):  # a file system without permissions
        root.chmod(0o700)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def is_own(path: Path) -> bool:
    """Whether something in the cache is there and belongs to the user alone, as its folder does."""
    try:
        _check_owner(cache_path())
        _check_owner(path)
    except OSError:
        return False
    return cache_path().is_absolute()


def _check_owner(path: Path) -> None:
    status = path.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")


def cache_problem() -> str | None:
    """The sentence for a cache that keeps nothing; None where it does."""
    folder = cache_path("data")
    try:
        make_cache_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
            file.flush()
    except OSError as err:
        return (
            f"the cache folder {cache_path()} cannot be used ({err.strerror or err}): prepared "
            "data, timings and checks are made anew by every run; XDG_CACHE_HOME names another "
            "folder"
        )
    return None


def read_json(path: Path) -> Any:
    """A JSON file of the cache; None where there is none that can be read."""
    if not is_own(path):
        return None
    try:
        return json.loads(file_text(path, OWN_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
