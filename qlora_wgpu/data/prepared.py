"""Data sets made ready, on disk: written once, mapped into memory from then on.

A prepared data set is a folder of flat arrays under a hash of everything it was made from. It
appears whole or not at all, and what it holds may be larger than memory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from qlora_wgpu.cache_folder import cache_path, make_cache_folder
from qlora_wgpu.data.examples import Counts, Dataset
from qlora_wgpu.files import file_text, open_file
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.limits import OWN_JSON_BYTES

_KEPT = 32  # data sets in the cache
VERSION = 1  # of how rows become tokens; a new one makes old folders unused
_ARRAYS = {"ids": np.int32, "labels": np.int32, "ends": np.int64}


def cache_folder() -> Path:
    """The folder of prepared data: ``qlora-wgpu/data`` in the user's cache folder."""
    return cache_path("data")


def key_of(files: list[Path], settings: Mapping[str, Any]) -> str:
    """A hash of the files' contents and of what else decides how they become tokens."""
    digest = hashlib.sha256(json.dumps([VERSION, settings], sort_keys=True).encode())
    for path in files:
        digest.update(path.name.encode())
        with open_file(path) as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


class Writer:
    """Takes examples one by one and makes a data set of them, in files or in memory."""

    def __init__(self, folder: Path | None) -> None:
        """Starts an empty data set.

        Args:
            folder: The folder to keep the data in, or None for memory.
        """
        self._folder = folder
        self._unfinished: Path | None = None
        self._files: dict[str, BinaryIO] = {}
        self._parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _ARRAYS}
        self._end = 0
        if folder is not None:
            make_cache_folder(folder.parent)
            self._unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
            self._files = {n: (self._unfinished / f"{n}.bin").open("wb") for n in _ARRAYS}

    def add(self, ids: list[int], labels: list[int]) -> None:
        """Appends an example."""
        self._end += len(ids)
        self._put("ids", np.array(ids, np.int32))
        self._put("labels", np.array(labels, np.int32))
        self._put("ends", np.array([self._end], np.int64))

    def _put(self, name: str, array: npt.NDArray[Any]) -> None:
        if self._folder is None:
            self._parts[name].append(array)
        else:
            self._files[name].write(array.data)

    def finish(self, counts: Counts, warnings: list[str]) -> Dataset:
        """Closes the data set and opens it for reading."""
        if self._folder is None or self._unfinished is None:
            arrays = {
                name: np.concatenate([np.zeros(0, dtype), *self._parts[name]])
                for name, dtype in _ARRAYS.items()
            }
            return Dataset.of_arrays(**arrays, counts=counts, warnings=warnings)
        for file in self._files.values():
            file.close()
        about = {"counts": asdict(counts), "warnings": warnings}
        (self._unfinished / "about.json").write_text(json.dumps(about), encoding="utf-8")
        try:
            self._unfinished.rename(self._folder)
        except OSError:  # another run has just finished the same
            shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished = None
        dataset = read(self._folder)
        assert dataset is not None
        return dataset

    def discard(self) -> None:
        """Removes what was written; nothing where the data set is finished."""
        for file in self._files.values():
            file.close()
        if self._unfinished is not None:
            shutil.rmtree(self._unfinished, ignore_errors=True)


def read(folder: Path) -> Dataset | None:
    """A finished data set, or None where there is none or it is damaged."""
    try:
        about = json.loads(file_text(folder / "about.json", OWN_JSON_BYTES))
        arrays = {n: _mapped(folder / f"{n}.bin", dtype) for n, dtype in _ARRAYS.items()}
        counts = Counts(**about["counts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    total = int(arrays["ends"][-1]) if len(arrays["ends"]) else 0
    if not len(arrays["ids"]) == len(arrays["labels"]) == total:
        return None
    return Dataset.of_arrays(**arrays, counts=counts, warnings=about["warnings"])


def _mapped(path: Path, dtype: Any) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype)
    with open_file(path) as file:
        return np.memmap(file, dtype, mode="r")


def prepare(folder: Path | None, fill: Callable[[Writer], tuple[Counts, list[str]]]) -> Dataset:
    """The data set of a folder, made by ``fill`` if it is not there.

    Args:
        folder: The folder to keep the data in, or None for memory only.
        fill: Adds all examples to a writer, and returns what became of the rows and what to tell.
    """
    dataset = read(folder) if folder is not None else None
    if dataset is not None and folder is not None:
        with suppress(OSError):
            (folder / "about.json").touch()  # used just now: see _forget_oldest
        return dataset
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        _forget_oldest(folder.parent)
    writer = Writer(folder)
    try:
        return writer.finish(*fill(writer))
    finally:
        writer.discard()


def _forget_oldest(cache: Path) -> None:
    """Makes room: of all prepared data, those used last are kept."""
    kept = list(cache.glob("*/about.json"))
    with suppress(OSError):
        for about in sorted(kept, key=lambda p: p.stat().st_mtime)[: -_KEPT + 1]:
            shutil.rmtree(about.parent, ignore_errors=True)


def learns(labels: list[int]) -> bool:
    """Whether a loss is taken over any position: the first is never predicted."""
    return any(label != IGNORE_INDEX for label in labels[1:])
