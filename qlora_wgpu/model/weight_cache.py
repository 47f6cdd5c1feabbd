"""Layers' weights on disk as the device takes them: quantized once, mapped from then on.

A model has a folder under a hash of what its weights were made from and how they are laid out, and
a layer a file in it: a header, then the layer's image. A file counts where its hash is right; else
the layer is quantized again and its file replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.cache_folder import cache_path, is_own, make_cache_folder
from qlora_wgpu.files import open_file
from qlora_wgpu.limits import MIB
from qlora_wgpu.mapped_files import let_go, map_file
from qlora_wgpu.model.layer_images import LayerImage
from qlora_wgpu.model.requantization import Requantization
from qlora_wgpu.presence import exists, is_dir
from qlora_wgpu.version import __version__

VERSION = 3  # of the files
_MAGIC = b"qlorawgp"
_HEADER = 4096  # bytes before an image, so that it begins with a page
_KEPT = 4  # models
_LEFT_FREE = 1024 * MIB  # of the disk
_TEMPORARY = ".tmp-"
_STALE_SECONDS = 3600
_PIECE = 1 << 24  # bytes that are hashed at a time


@dataclass(frozen=True)
class KeptLayer:
    """A layer as a file has it.

    Attributes:
        data: Its image.
        requantized: How far its weights moved that were quantized anew.
    """

    data: npt.NDArray[np.uint8]
    requantized: Requantization


class WeightCache:
    """A model's folder in the cache.

    Attributes:
        folder: Its path.
        problem: Why nothing more is written to it; empty while all is well.
    """

    def __init__(self, made_from: Any, images: Iterable[LayerImage]) -> None:
        """Looks at nothing yet.

        Args:
            made_from: What decides the layers' bytes, as JSON takes it.
            images: All layers.
        """
        tables = [(image.number, image.table) for image in images]
        about = json.dumps([VERSION, __version__, made_from, tables], sort_keys=True)
        self.folder = cache_path("weights", hashlib.sha256(about.encode()).hexdigest()[:32])
        self.problem = ""

    @property
    def is_there(self) -> bool:
        """Whether anything is kept."""
        return is_own(self.folder)

    def make_room(self, images: Iterable[LayerImage]) -> bool:
        """Whether those of these layers that are not there will find room on the disk.

        Models that were used longest ago give way. ``problem`` says where there is none.
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
                f"they take {needed / MIB:,.0f} MiB, and {free / MIB:,.0f} MiB are free, of which "
                f"{_LEFT_FREE / MIB:,.0f} stay free"
            )
        return not self.problem

    def read(self, image: LayerImage) -> KeptLayer | None:
        """A layer, mapped; None where it is not there, damaged or another one."""
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
        return KeptLayer(mapped, moved) if header.get("sha256") == _hash(mapped) else None

    def write(self, image: LayerImage, layer: KeptLayer) -> npt.NDArray[np.uint8] | None:
        """Keeps a layer and maps its bytes; None where that fails, and ``problem`` says why."""
        if self.problem:
            return None
        about = {"version": VERSION, "of": self._name(image), "sha256": _hash(layer.data)}
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

    def _path(self, image: LayerImage) -> Path:
        return self.folder / f"layer-{image.number:04}.bin"

    def _name(self, image: LayerImage) -> str:
        """What a layer's file says that it is of, wherever it lies."""
        return f"{self.folder.name}/{image.number}"

    def _fail(self, reason: str) -> None:
        self.problem = (
            f"the weights that are quantized here are not kept in {self.folder.parent} ({reason}), "
            "so they wait in host memory and the next run quantizes them again: make room there, "
            "or name another folder in XDG_CACHE_HOME"
        )


def _content(start: bytes) -> bytes:
    """The header's JSON.

    Raises:
        ValueError: If it is none.
    """
    length = int.from_bytes(start[8:16], "little")
    if start[:8] != _MAGIC or length > len(start) - 16:
        raise ValueError
    return start[16 : 16 + length]


def _hash(data: npt.NDArray[np.uint8]) -> str:
    digest = hashlib.sha256()
    for begin in range(0, data.size, _PIECE):
        piece = data[begin : begin + _PIECE]
        view: Any = piece.data
        digest.update(view)
        let_go(piece)
    return digest.hexdigest()


def _forget_oldest(cache: Path) -> None:
    """Of all models, those used last are kept; what killed writers left goes, too."""
    folders = [path for path in cache.iterdir() if is_dir(path)]
    for folder in sorted(folders, key=lambda p: p.stat().st_mtime)[:-_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)
    for path in cache.glob(f"*/{_TEMPORARY}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
