"""The cache folder of this package, which is private to its user.

Without a usable cache everything is computed again, and entries count only if they are complete and
belong to the user: no run fails, or computes anything else, because of a cache.
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

_READ_XDG = sys.platform in ("win32", "darwin")  # where platformdirs may not read it


def folder_of_this_process(prefix: str) -> Path:
    """A temporary folder until this process ends, for use without a cache."""
    made = tempfile.TemporaryDirectory(prefix=prefix)
    atexit.register(made.cleanup)  # keeps it until then, without a warning by Python
    return Path(made.name)


def cache_path(*names: str) -> Path:
    """A path in this package's cache folder, which is not created.

    On Linux that is ``~/.cache/qlora-wgpu``. ``XDG_CACHE_HOME`` sets another on every system.
    """
    if _READ_XDG and (chosen := os.environ.get("XDG_CACHE_HOME", "").strip()):
        return Path(chosen, "qlora-wgpu", *names)
    try:
        root = platformdirs.user_cache_dir("qlora-wgpu", appauthor=False)
    except RuntimeError:  # a user without a home folder
        root = "~/.cache/qlora-wgpu"
    return Path(root, *names)


def make_cache_folder(folder: Path) -> None:
    """Creates a folder of the cache, readable only by its user, since it has users' data.

    Raises an OSError if it cannot be created, or belongs to another user.
    """
    root = cache_path()
    if not root.is_absolute():  # where there is no home folder
        raise OSError("it is not an absolute path")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(root)
    with suppress(OSError):  # a file system without permissions
        root.chmod(0o700)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def is_own(path: Path) -> bool:
    """Whether an entry exists and, like the cache folder, belongs to this user."""
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
    """A sentence about a cache that cannot be used; None if it can."""
    folder = cache_path("data")
    try:
        make_cache_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
            file.flush()
    except OSError as err:
        return (
            f"the cache folder {cache_path()} cannot be used ({err.strerror or err}): every run "
            "prepares data, tunes kernels and verifies the driver again; set XDG_CACHE_HOME to "
            "another folder"
        )
    return None


def read_json(path: Path) -> Any:
    """A JSON file of the cache; None if it is missing or cannot be read."""
    if not is_own(path):
        return None
    try:
        return json.loads(file_text(path, OWN_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
