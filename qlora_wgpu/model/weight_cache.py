"""A layer's weights as one run of bytes, and a disk cache of layers that are quantized here."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.cache_folder import cache_path, is_own, make_cache_folder
from qlora_wgpu.files import exists, is_dir, open_file
from qlora_wgpu.gpu.limits import buffer_bytes
from qlora_wgpu.graph.offload import WeightGroup
from qlora_wgpu.graph.tensor import WINDOW, Storage
from qlora_wgpu.limits import MIB
from qlora_wgpu.mapped_files import map_file, sha256
from qlora_wgpu.model.checkpoint_reader import Requantization
from qlora_wgpu.version import __version__

Fill = Callable[[Storage, npt.NDArray[Any]], None]


@dataclass(eq=False)
class FlatLayer:
    """A layer's storages, one after the other."""

    number: int
    group: WeightGroup | None  # for streaming; None if they stay on the device
    parts: list[tuple[int, Storage]] = field(default_factory=list)  # where each begins
    together: Storage | None = None  # the storage that those which stay share
    nbytes: int = 0  # of all, gaps included
    copied: int = 0  # bytes in host memory if the rest is mapped from the model's files
    as_stored: bool = True  # whether nearly all of it is stored in the device's form

    def storage(self, label: str, nbytes: int, most: int = 0) -> Storage:
        """Appends a storage; those that stay share larger ones of ``most`` bytes."""
        begin = self.nbytes
        if self.group is not None:
            storage = self.group.storage(label, nbytes)
        elif nbytes > most:
            storage = Storage(label, "base", nbytes)
        else:
            storage = self._together(nbytes, most).part(label, nbytes)
        self.parts.append((begin, storage))
        self.nbytes += -(-nbytes // WINDOW) * WINDOW
        return storage

    def _together(self, nbytes: int, most: int) -> Storage:
        if self.together is None or self.together.nbytes + nbytes > most:
            self.together = Storage(f"layer {self.number}", "base", 0)
        return self.together

    @cached_property
    def begins(self) -> dict[Storage, int]:
        return {storage: begin for begin, storage in self.parts}

    @property
    def table(self) -> list[tuple[int, str, int]]:
        return [(begin, storage.label, storage.nbytes) for begin, storage in self.parts]

    @property
    def device_bytes(self) -> int:
        if self.group is not None:
            return 0
        wholes = dict.fromkeys(storage.whole for _, storage in self.parts)
        return sum(buffer_bytes(whole.nbytes) for whole in wholes)

    @property
    def host_bytes(self) -> int:
        if self.group is None:
            return 0
        return self.copied if self.as_stored else self.nbytes

    def fill(self, image: npt.NDArray[np.uint8], fill: Fill) -> None:
        """Fills it from an image, mapped or in memory; ``fill`` uploads what stays."""
        if self.group is not None:
            self.group.chunks = {0: image}
            return
        for begin, storage in self.parts:
            fill(storage, image[begin : begin + storage.nbytes])


VERSION = 3  # of the files
_MAGIC = b"qlorawgp"
_HEADER = 4096  # bytes before an image, so that it begins with a page
_KEPT = 4  # models
_LEFT_FREE = 1024 * MIB  # on the disk
_TEMPORARY = ".tmp-"
_STALE_SECONDS = 3600


@dataclass(frozen=True)
class KeptLayer:
    """A layer read from the cache."""

    data: npt.NDArray[np.uint8]  # its image
    requantized: Requantization  # how much its requantized weights changed


class WeightCache:
    """A model's folder in the cache.

    It is named by a hash of the weights' source and layout, and has a file for each layer: a
    header, then the layer's image. If a file's hash is wrong, the layer is quantized again and the
    file replaced.
    """

    def __init__(self, made_from: Any, images: Iterable[FlatLayer]) -> None:
        """``made_from``, serializable as JSON, decides the bytes of all layers."""
        tables = [(image.number, image.table) for image in images]
        about = json.dumps([VERSION, __version__, made_from, tables], sort_keys=True)
        self.folder = cache_path("weights", hashlib.sha256(about.encode()).hexdigest()[:32])
        self.problem = ""  # why nothing more is written

    @property
    def is_there(self) -> bool:
        return is_own(self.folder)

    def make_room(self, images: Iterable[FlatLayer]) -> bool:
        """Whether the disk has room for those of these layers that are missing.

        Deletes the models used least recently to make room. If there is none, ``problem`` says so.
        """
        missing = [i for i in images if not exists(self._path(i))]
        needed = sum(_HEADER + image.nbytes for image in missing)
        try:
            make_cache_folder(self.folder)
            os.utime(self.folder)  # used just now
            _forget_oldest(self.folder.parent)
            free = shutil.disk_usage(self.folder).free
        except OSError as err:
            self._fail(err.strerror or str(err))
            return False
        if missing and needed + _LEFT_FREE > free:
            self._fail(
                f"{needed / MIB:,.0f} MiB are needed, {free / MIB:,.0f} MiB are free, and "
                f"{_LEFT_FREE / MIB:,.0f} MiB must stay free"
            )
        return not self.problem

    def read(self, image: FlatLayer) -> KeptLayer | None:
        """A layer, mapped; None if it is missing, damaged or another one."""
        path = self._path(image)
        if not is_own(path):
            return None
        try:
            with open_file(path) as file:
                header = json.loads(_content(file.read(_HEADER)))
                if header["of"] != self._name(image):
                    return None
                moved = Requantization(*header["requantized"])
                if os.fstat(file.fileno()).st_size != _HEADER + image.nbytes:
                    return None
                mapped = map_file(path, file, _HEADER)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        is_whole = header.get("sha256") == sha256(mapped).hexdigest()
        return KeptLayer(mapped, moved) if is_whole else None

    def write(self, image: FlatLayer, layer: KeptLayer) -> npt.NDArray[np.uint8] | None:
        """Writes a layer and maps its bytes; None if that fails, and ``problem`` says why."""
        if self.problem:
            return None
        digest = sha256(layer.data).hexdigest()
        about = {"version": VERSION, "of": self._name(image), "sha256": digest}
        header = json.dumps(about | {"requantized": astuple(layer.requantized)}).encode()
        start = _MAGIC + len(header).to_bytes(8, "little") + header
        temporary = self.folder / f"{_TEMPORARY}{secrets.token_hex(6)}"
        try:
            make_cache_folder(self.folder)
            with temporary.open("xb") as file:
                file.write(start.ljust(_HEADER, b"\0"))
                file.write(layer.data.data)
            temporary.replace(self._path(image))
        except OSError as err:
            self._fail(err.strerror or str(err))
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return None
        path = self._path(image)
        with suppress(OSError), open_file(path) as file:
            return map_file(path, file, _HEADER)
        return None

    def _path(self, image: FlatLayer) -> Path:
        return self.folder / f"layer-{image.number:04}.bin"

    def _name(self, image: FlatLayer) -> str:
        return f"{self.folder.name}/{image.number}"

    def _fail(self, reason: str) -> None:
        self.problem = (
            f"the quantized weights cannot be cached in {self.folder.parent} ({reason}), so they "
            "stay in host memory and the next run quantizes them again: free disk space, or set "
            "XDG_CACHE_HOME to another folder"
        )


def _content(start: bytes) -> bytes:
    length = int.from_bytes(start[8:16], "little")
    if start[:8] != _MAGIC or length > len(start) - 16:
        raise ValueError
    return start[16 : 16 + length]


def _forget_oldest(cache: Path) -> None:
    """Deletes all but the models used last, and files left by killed writers."""
    folders = [path for path in cache.iterdir() if is_dir(path)]
    for folder in sorted(folders, key=lambda p: p.stat().st_mtime)[:-_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)
    for path in cache.glob(f"*/{_TEMPORARY}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
