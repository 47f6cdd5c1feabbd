"""A place for the adapter of a run whose own folder is lost."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from qlora_wgpu.cache_folder import cache_path, make_cache_folder
from qlora_wgpu.errors import CheckpointError


def rescued(name: str, save: Callable[[Path], None]) -> Path | None:
    """Saves something in the first place that takes it.

    Args:
        name: The run's.
        save: Saves it into a folder.

    Returns:
        The folder, or None if no place takes it.
    """
    for place in _places():
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=place()))
            save(folder)
            return folder
        except (OSError, CheckpointError):
            continue
    return None


def _places() -> Iterator[Callable[[], Path]]:
    """The user's cache, the system's temporary folder, the present one."""
    yield _cache
    yield lambda: Path(tempfile.gettempdir())
    yield Path.cwd


def _cache() -> Path:
    folder = cache_path("rescued")
    make_cache_folder(folder)
    return folder
