"""A small file of the cache, which several processes may write at once."""

from __future__ import annotations

from pathlib import Path

from qlora_wgpu.cache_folder import make_cache_folder
from qlora_wgpu.checkpoint.atomic import write_file
from qlora_wgpu.checkpoint.file_lock import FileLock
from qlora_wgpu.errors import CheckpointError


def write_cache_file(path: Path, content: str) -> str:
    """Replaces a file of the cache, unless another process is writing it just now.

    Returns:
        Empty, or a sentence on why it cannot be written, which costs time only.
    """
    try:
        make_cache_folder(path.parent)
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        if lock.acquire():
            write_file(path, content.encode())
            lock.release()
    except CheckpointError as err:
        return str(err)
    except OSError as err:
        return f"{path} cannot be written: {err.strerror or err}"
    return ""
