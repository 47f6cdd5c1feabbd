"""A place for the adapter of a run whose own folder is lost."""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from qlora_wgpu.cache_folder import cache_path, make_cache_folder
from qlora_wgpu.checkpoint import remove, write_file
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.files import file_text
from qlora_wgpu.limits import KIB

_RUN = "run.txt"  # in a rescued adapter's folder: the path of its run


def rescued(run: Path, save: Callable[[Path], None]) -> Path | None:
    """Saves something in the first place that takes it.

    Args:
        run: The run's folder, by whose name the place is known.
        save: Saves it into a folder.

    Returns:
        The folder, or None if no place takes it.
    """
    for place in _places():
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{run.name}-", dir=place()))
            save(folder)
            write_file(folder / _RUN, f"{run.absolute()}\n".encode())
            return folder
        except (OSError, CheckpointError):
            continue
    return None


def forget_rescued(run: Path) -> list[Path]:
    """Removes what was rescued of a run that has ended well since; the folders.

    Args:
        run: The run's folder, which holds its adapter.
    """
    removed = []
    for place in _places():
        with suppress(OSError, CheckpointError, UnicodeError):
            for mark in place().glob(f"{glob.escape(run.name)}-*/{_RUN}"):
                is_ours = not hasattr(os, "getuid") or mark.stat().st_uid == os.getuid()
                if is_ours and file_text(mark, 64 * KIB) == f"{run.absolute()}\n":
                    remove(mark.parent)
                    removed.append(mark.parent)
    return removed


def _places() -> Iterator[Callable[[], Path]]:
    """The user's cache, the system's temporary folder, the present one."""
    yield _cache
    yield lambda: Path(tempfile.gettempdir())
    yield Path.cwd


def _cache() -> Path:
    folder = cache_path("rescued")
    make_cache_folder(folder)
    return folder
