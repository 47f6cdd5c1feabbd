"""Files and folders that appear whole or not at all, whatever kills the process.

Everything is written under a temporary name in the same folder, flushed to the disk, and renamed;
then the folder is flushed, which makes the rename itself last.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from qlora_wgpu.checkpoint.safetensors_format import METADATA
from qlora_wgpu.errors import CheckpointError

_TEMPORARY = ".tmp-"  # what a killed process leaves behind; the next one with that name replaces it
_REPLACED = ".old-"


def write_file(path: str | PathLike[str], content: bytes) -> None:
    """Writes a file, or replaces it; its permissions follow the umask.

    Raises:
        CheckpointError: If it cannot be written.
    """
    path = Path(path)
    with _explained(path):
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        temporary = path.with_name(_TEMPORARY + path.name)
        try:
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _flush_folder(path.parent)


@contextmanager
def atomic_folder(path: str | PathLike[str]) -> Iterator[Path]:
    """Makes a folder, or replaces it, once everything in it has been written.

    Usage: ``with atomic_folder(path) as unfinished: ...`` and write into ``unfinished``. If the
    body raises, nothing of it stays and what ``path`` held before is untouched.

    Raises:
        CheckpointError: If it cannot be written.
    """
    path = Path(path)
    temporary, replaced = (path.with_name(prefix + path.name) for prefix in (_TEMPORARY, _REPLACED))
    with _explained(path):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(0, "it is a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        if replaced.exists() and not path.exists():
            replaced.rename(path)  # a process was killed between the two renames below
        for stale in (temporary, replaced):
            if stale.exists():
                shutil.rmtree(stale)
        temporary.mkdir()
        try:
            yield temporary
            _flush_tree(temporary)
            if path.exists():
                path.rename(replaced)
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            if replaced.exists() and not path.exists():
                replaced.rename(path)
            raise
        _flush_folder(path.parent)
        if replaced.exists():
            shutil.rmtree(replaced)


def write_safetensors(
    path: str | PathLike[str],
    tensors: Mapping[str, npt.NDArray[np.generic]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors as a safetensors file, atomically.

    Args:
        path: The file.
        tensors: Arrays by name.
        metadata: Strings to store beside them; {"format": "pt"} if None, without which
            transformers refuses a model's file.

    Raises:
        CheckpointError: If it cannot be written.
    """
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    content = safetensors.numpy.save(contiguous, dict(metadata or METADATA))
    write_file(path, content)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise CheckpointError(f"{path} cannot be written: {err.strerror or err}") from err


def _flush_tree(folder: Path) -> None:
    mode = "rb+" if os.name == "nt" else "rb"  # Windows flushes only what can be written
    for parent, _, names in os.walk(folder):
        for name in names:
            with (Path(parent) / name).open(mode) as file:
                os.fsync(file.fileno())
        _flush_folder(Path(parent))


def _flush_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows opens no folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
