"""The user's private cache folder.

Everything in it can be computed again, and is used only if it is complete and belongs to the user:
no run fails or computes something else because of the cache.
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

_READS_XDG = sys.platform in ("win32", "darwin")  # where not every platformdirs does


def folder_of_this_process(prefix: str) -> Path:
    """A temporary folder that is removed when this process ends."""
    folder = tempfile.TemporaryDirectory(prefix=prefix)
    atexit.register(folder.cleanup)  # also keeps it alive until then
    return Path(folder.name)


def cache_path(*names: str) -> Path:
    """A path in this package's cache folder, which is not created.

    On Linux that is ``~/.cache/qlora-wgpu``; ``XDG_CACHE_HOME`` changes it on every system.
    """
    if _READS_XDG and (chosen := os.environ.get("XDG_CACHE_HOME", "").strip()):
        return Path(chosen, "qlora-wgpu", *names)
    try:
        root = platformdirs.user_cache_dir("qlora-wgpu", appauthor=False)
    except RuntimeError:  # a user without a home folder
        root = "~/.cache/qlora-wgpu"
    return Path(root, *names)


def make_cache_folder(folder: Path) -> None:
    """Creates a folder of the cache, which only the user may read: it holds users' data.

    Raises an OSError if it cannot be created, or the cache belongs to another user.
    """
    root = cache_path()
    if not root.is_absolute():  # without a home folder
        raise OSError("it is not an absolute path")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(root)
    with suppress(OSError):  # a file system without permissions
        root.chmod(0o700)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def is_own(path: Path) -> bool:
    """Whether something in the cache exists and belongs to the user, like the cache itself."""
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
    """A warning if the cache cannot be written to, or None."""
    folder = cache_path("data")
    try:
        make_cache_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
            file.flush()
    except OSError as err:
        return (
            f"the cache folder {cache_path()} cannot be used ({err.strerror or err}): prepared "
            "data, timings and checks are computed again by every run; set XDG_CACHE_HOME to "
            "another folder"
        )
    return None


def read_json(path: Path) -> Any:
    """The contents of a JSON file in the cache; None if it cannot be read."""
    if not is_own(path):
        return None
    try:
        return json.loads(file_text(path, OWN_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
