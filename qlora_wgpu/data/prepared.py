"""The cache of tokenized data sets: written once, then memory-mapped.

A data set is a folder of flat arrays under a hash of everything that it depends on. It is published
atomically and may be larger than memory.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from qlora_wgpu.cache_folder import cache_path, is_own, make_cache_folder
from qlora_wgpu.checkpoint import FileLock
from qlora_wgpu.checkpoint.atomic import flush_tree
from qlora_wgpu.data.examples import Counts, Dataset, ImageTable
from qlora_wgpu.files import exists, file_text, open_file
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.images.stored import read_images, write_images
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.limits import OWN_JSON_BYTES
from qlora_wgpu.mapped_files import map_file

# ---- unfinished folders --------------------------------------------------------------------------

_PREFIX, _LOCK = ".unfinished-", ".lock"


class StagingFolder:
    """A folder that is being written.

    ``.unfinished-X.lock`` is held as long as ``.unfinished-X`` exists, so a folder whose lock is
    free was left by a killed process.
    """

    def __init__(self, parent: Path) -> None:
        self._lock = _new_lock(parent)
        self.path = self._lock.path.with_suffix("")
        try:
            self.path.mkdir(mode=0o700)
        except BaseException:
            self.discard()
            raise

    def publish(self, folder: Path) -> None:
        """Renames it to its final name, unless another process has just done so."""
        if not exists(folder):
            self.path.rename(folder)

    def discard(self) -> None:
        """Removes what is left of it; a later process sweeps up what cannot be removed."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.remove()


def sweep(parent: Path) -> None:
    """Removes what killed processes left."""
    with suppress(OSError):
        for entry in list(parent.iterdir()):
            if entry.name.startswith(_PREFIX):
                with suppress(OSError):
                    _sweep(entry)


def _sweep(entry: Path) -> None:
    if entry.suffix != _LOCK:
        if not exists(entry.with_name(entry.name + _LOCK)):
            shutil.rmtree(entry, ignore_errors=True)
        return
    lock = FileLock(entry)
    if lock.acquire() and lock.is_exclusive:
        shutil.rmtree(entry.with_suffix(""), ignore_errors=True)
        if not exists(entry.with_suffix("")):
            lock.remove()
    lock.release()


def _new_lock(parent: Path) -> FileLock:
    while True:
        lock = FileLock(parent / f"{_PREFIX}{secrets.token_hex(6)}{_LOCK}")
        if lock.acquire():  # else another process's sweep holds it
            return lock


# ---- cached data sets ----------------------------------------------------------------------------

_KEPT = 32  # data sets in the cache
VERSION = 14  # of the tokenization and the arrays; another one invalidates the cache
_ARRAYS = {
    "ids": np.int32, "labels": np.int32, "ends": np.int64, "weights": np.float32,
    "continues": np.uint8, "image_numbers": np.int32, "image_ends": np.int64,
    "targets": np.float32,
}  # fmt: skip
_OF_EXAMPLES = ("ends", "weights", "continues", "image_ends")  # have an element for each example


def cache_folder() -> Path:
    """``qlora-wgpu/data`` in the user's cache folder."""
    return cache_path("data")


def key_of(files: list[Path], settings: Mapping[str, Any]) -> str:
    """A hash of the files' contents and of the settings of their tokenization."""
    digest = hashlib.sha256(json.dumps([VERSION, settings], sort_keys=True).encode())
    for path in files:
        digest.update(path.name.encode())
        with open_file(path) as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


class _NotCached(Exception):
    """Files of the cache cannot be written."""


@contextmanager
def _writing(folder: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        where = folder and folder.parent
        raise _NotCached(f"cannot write {where}: {err.strerror or err}") from err


class DatasetWriter:
    """Collects examples into a data set, in a folder or (None) in memory."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._unfinished: StagingFolder | None = None
        self._files: dict[str, BinaryIO] = {}
        self._digests = {name: hashlib.sha256() for name in _ARRAYS}
        self._end = self._image_end = 0
        self._images: dict[str, tuple[int, ImageSource]] = {}  # with their numbers
        try:
            with _writing(folder):
                self._begin()
        except _NotCached:
            self.discard()
            raise

    def _begin(self) -> None:
        if self._folder is None:
            self._files = {name: BytesIO() for name in _ARRAYS}
            return
        make_cache_folder(self._folder.parent)
        self._unfinished = StagingFolder(self._folder.parent)
        self._files = {n: (self._unfinished.path / f"{n}.bin").open("wb") for n in _ARRAYS}

    def add(
        self, ids: list[int], labels: list[int], weight: float = 1.0, *, continues: bool = False,
        images: Sequence[ImageSource] = (), targets: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """Appends an example; ``continues`` marks another window of the document before it.

        All examples have equally many ``targets``.
        """
        self._end += len(ids)
        self._image_end += len(images)
        numbers = [self._images.setdefault(i.key, (len(self._images), i))[0] for i in images]
        values: tuple[list[Any], ...] = (
            ids, labels, [self._end], [weight], [continues], numbers, [self._image_end],
            list(targets),
        )  # fmt: skip
        with _writing(self._folder):
            for (name, dtype), value in zip(_ARRAYS.items(), values, strict=True):
                data = np.array(value, dtype).data
                self._files[name].write(data)
                self._digests[name].update(data)

    def finish(self, counts: Counts, warnings: list[str]) -> Dataset:
        """Closes the data set and opens it for reading."""
        if self._folder is None or self._unfinished is None:
            arrays = {name: self._array(name) for name in _ARRAYS}
            return _dataset(arrays, [each for _, each in self._images.values()], counts, warnings)
        with _writing(self._folder):
            self._publish(self._unfinished, self._folder, counts, warnings)
        dataset = read(self._folder)
        if dataset is None:
            raise _NotCached(f"cannot read {self._folder} again")
        return dataset

    def _array(self, name: str) -> npt.NDArray[Any]:
        file = self._files[name]
        file.seek(0)
        return np.frombuffer(bytearray(file.read()), _ARRAYS[name])

    def _publish(
        self, unfinished: StagingFolder, folder: Path, counts: Counts, warnings: list[str]
    ) -> None:
        for file in self._files.values():
            file.close()
        about = {
            "made_from": folder.name,
            "counts": asdict(counts),
            "warnings": warnings,
            "sha256": {name: digest.hexdigest() for name, digest in self._digests.items()},
        }
        write_images(unfinished.path, [each for _, each in self._images.values()])
        (unfinished.path / "about.json").write_text(json.dumps(about), encoding="utf-8")
        flush_tree(unfinished.path)
        unfinished.publish(folder)

    def discard(self) -> None:
        """Removes what was written, unless the data set is finished."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        if self._unfinished is not None:
            self._unfinished.discard()


def read(folder: Path) -> Dataset | None:
    """The data set of a folder, or None if it is missing, damaged or another user's."""
    if not is_own(folder):
        return None
    try:
        about = json.loads(file_text(folder / "about.json", OWN_JSON_BYTES))
        if about["made_from"] != folder.name:  # it was renamed
            return None
        if any(_sha256(folder / f"{n}.bin") != about["sha256"][n] for n in _ARRAYS):
            return None
        arrays = {n: _mapped(folder / f"{n}.bin", dtype) for n, dtype in _ARRAYS.items()}
        counts = Counts(**{name: int(count) for name, count in about["counts"].items()})
        warnings = [str(text) for text in about["warnings"]]
        images = read_images(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    total, of_images = (int(arrays[n][-1]) if len(arrays[n]) else 0 for n in ("ends", "image_ends"))
    if len({len(arrays[name]) for name in _OF_EXAMPLES}) > 1 or images is None:
        return None
    if len(arrays["targets"]) and len(arrays["targets"]) % len(arrays["ends"]):
        return None
    if not len(arrays["ids"]) == len(arrays["labels"]) == total:
        return None
    numbers = arrays["image_numbers"]
    if len(numbers) != of_images or (len(numbers) and int(numbers.max()) >= len(images)):
        return None
    return _dataset(arrays, images, counts, warnings)


def _dataset(
    arrays: dict[str, npt.NDArray[Any]], images: Sequence[ImageSource], counts: Counts,
    warnings: Sequence[str],
) -> Dataset:  # fmt: skip
    table = ImageTable(images, arrays.pop("image_numbers"), arrays.pop("image_ends"))
    return Dataset.of_arrays(**arrays, counts=counts, warnings=warnings, images=table)


def _sha256(path: Path) -> str:
    with open_file(path) as file:  # not through the map, which would count as memory
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mapped(path: Path, dtype: Any) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype)
    with open_file(path) as file:
        mapped: npt.NDArray[Any] = map_file(path, file).view(dtype)
        return mapped


def load_or_build(
    folder: Path | None, fill: Callable[[DatasetWriter], tuple[Counts, list[str]]]
) -> Dataset:
    """The data set of a folder, built by ``fill`` if it is missing.

    It is built in memory without a folder or, with a warning, if the folder cannot be written.
    ``fill`` returns the counts of the rows and the warnings.
    """
    if folder is not None:
        sweep(folder.parent)
    dataset = read(folder) if folder is not None else None
    if dataset is not None and folder is not None:
        with suppress(OSError):
            (folder / "about.json").touch()  # most recently used: see _evict_oldest
        return dataset
    if folder is None:
        return _filled(DatasetWriter(None), fill)
    shutil.rmtree(folder, ignore_errors=True)
    _evict_oldest(folder.parent)
    try:
        return _filled(DatasetWriter(folder), fill)
    except _NotCached as err:
        dataset = _filled(DatasetWriter(None), fill)
        dataset.warnings += (f"tokenized data is not cached: {err}",)
        return dataset


def _filled(
    writer: DatasetWriter, fill: Callable[[DatasetWriter], tuple[Counts, list[str]]]
) -> Dataset:
    try:
        return writer.finish(*fill(writer))
    finally:
        writer.discard()


def _evict_oldest(cache: Path) -> None:
    with suppress(OSError):
        kept = list(cache.glob("*/about.json"))
        for about in sorted(kept, key=lambda p: p.stat().st_mtime)[: -_KEPT + 1]:
            shutil.rmtree(about.parent, ignore_errors=True)


def has_labels(labels: list[int]) -> bool:
    """Whether the loss is taken on any token; the first is never predicted."""
    return any(label != IGNORE_INDEX for label in labels[1:])
