"""The folder in which this package keeps what it can make again, and which is its user's alone."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import platformdirs


def cache_path(*names: str) -> Path:
    """A path in the operating system's cache folder for this package; nothing is made there.

    On Linux that is ``~/.cache/qlora-wgpu``, or another folder where ``XDG_CACHE_HOME`` says so.
    """
    return Path(platformdirs.user_cache_dir("qlora-wgpu", appauthor=False), *names)


def make_cache_folder(folder: Path) -> None:
    """Makes a folder of the cache. Nobody else may look into the cache: it holds users' data.

    Raises:
        OSError: If it cannot be made.
    """
    root = cache_path()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):  # someone else's folder, or a file system without permissions
        root.chmod(0o700)
    folder.mkdir(parents=True, exist_ok=True)
