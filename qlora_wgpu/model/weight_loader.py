"""Reading weights in the order of layers, from the model or the cache, as one run of bytes each.

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
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from dataclasses import astuple, dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.cache_folder import cache_path, is_own, make_cache_folder
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.files import open_file
from qlora_wgpu.gpu.limits import buffer_bytes
from qlora_wgpu.gpu.memory import available_bytes
from qlora_wgpu.graph.offload import Section, Stream
from qlora_wgpu.graph.tensor import WINDOW, Storage
from qlora_wgpu.limits import MIB
from qlora_wgpu.mapped_files import let_go, map_file
from qlora_wgpu.model.checkpoint_reader import Requantization
from qlora_wgpu.presence import exists, is_dir
from qlora_wgpu.version import __version__

Fill = Callable[[Storage, npt.NDArray[Any]], None]


@dataclass(eq=False)
class LayerImage:
    """A layer's storages, one behind the other.

    Attributes:
        number: The layer's.
        section: What they come and go with; None where they stay on the device.
        parts: The storages with the byte at which each begins.
        together: What those lie in that stay on the device and may be bound at once.
        nbytes: Bytes of all, gaps included.
        copied: Bytes of what is in host memory where the rest is the model's own files'.
        as_stored: Whether the model's files hold nearly all of it as the device takes it.
    """

    number: int
    section: Section | None
    parts: list[tuple[int, Storage]] = field(default_factory=list)
    together: Storage | None = None
    nbytes: int = 0
    copied: int = 0
    as_stored: bool = True

    def storage(self, label: str, nbytes: int, most: int = 0) -> Storage:
        """A storage at its end.

        Args:
            label: For messages.
            nbytes: Its size.
            most: Bytes of a larger storage that it is to lie in together with its neighbours.
        """
        begin = self.nbytes
        if self.section is not None:
            storage = self.section.storage(label, nbytes)
        elif nbytes > most:
            storage = Storage(label, "base", nbytes)
        else:
            storage = self._together(nbytes, most).part(label, nbytes)
        self.parts.append((begin, storage))
        self.nbytes += -(-nbytes // WINDOW) * WINDOW
        return storage

    def _together(self, nbytes: int, most: int) -> Storage:
        """A storage with room for so many bytes more."""
        if self.together is None or self.together.nbytes + nbytes > most:
            self.together = Storage(f"layer {self.number}", "base", 0)
        return self.together

    @cached_property
    def begins(self) -> dict[Storage, int]:
        """Where each storage begins, once all are there."""
        return {storage: begin for begin, storage in self.parts}

    @property
    def table(self) -> list[tuple[int, str, int]]:
        """Where what begins, and how long it is."""
        return [(begin, storage.label, storage.nbytes) for begin, storage in self.parts]

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of what stays there."""
        if self.section is not None:
            return 0
        wholes = dict.fromkeys(storage.whole for _, storage in self.parts)
        return sum(buffer_bytes(whole.nbytes) for whole in wholes)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it takes without a file of its own."""
        if self.section is None:
            return 0
        return self.copied if self.as_stored else self.nbytes

    def fill(self, image: npt.NDArray[np.uint8], fill: Fill) -> None:
        """Takes its bytes from an image.

        Args:
            image: All of them; mapped, or in memory.
            fill: Gives a storage that stays on the device its bytes.
        """
        if self.section is not None:
            self.section.pieces = {0: image}
            return
        for begin, storage in self.parts:
            fill(storage, image[begin : begin + storage.nbytes])


class LayerImages:
    """Those of a model."""

    def __init__(self) -> None:
        """Holds none yet."""
        self.stream = Stream()
        self.layers: dict[int, LayerImage] = {}

    def of(self, number: int, *, streamed: bool) -> LayerImage:
        """A layer's.

        Args:
            number: The layer's.
            streamed: Whether it comes and goes, if it is new.
        """
        if number not in self.layers:
            section = self.stream.new_section(f"layer {number}") if streamed else None
            self.layers[number] = LayerImage(number, section)
        return self.layers[number]

    @property
    def sections(self) -> list[Section]:
        """Those of the layers that come and go."""
        sections = (image.section for image in self.layers.values())
        return [section for section in sections if section is not None]

    @property
    def kept(self) -> list[LayerImage]:
        """Those of which files are made, since the model's own have them otherwise."""
        return [i for i in self.layers.values() if not i.as_stored]

    def host_bytes(self, *, kept: bool) -> int:
        """Bytes of host memory that those take which come and go.

        Args:
            kept: Whether files are made of those that are unlike the model's.
        """
        images = (i for i in self.layers.values() if i.as_stored or not kept)
        return sum(image.host_bytes for image in images)


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


_LEAST_KEPT = 64 * MIB  # less is quantized in a second

Load = Callable[[], None]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Deferred:
    """A tensor that is to be read, and the layer that it belongs to, if it comes from one."""

    name: str
    load: Load
    image: LayerImage | None = None


class WeightLoading:
    """What is to be read of a model.

    Attributes:
        images: Its layers.
    """

    def __init__(self, made_from: Callable[[], Any], requantization: Requantization) -> None:
        """Knows of nothing yet.

        Args:
            made_from: Tells what decides the layers' bytes, for a cache; None where there is none.
            requantization: Counts the weights that are quantized anew.
        """
        self._requantization = requantization
        self.images = LayerImages()
        self._made_from = made_from
        self._loads: list[_Deferred] = []
        self._being_made: tuple[LayerImage, npt.NDArray[np.uint8]] | None = None

    def __len__(self) -> int:
        """Number of names that will be told."""
        return len(self._loads)

    def add(self, name: str, load: Load, image: LayerImage | None) -> None:
        """Adds a tensor."""
        self._loads.append(_Deferred(name, load, image))

    def run(self, fill: Fill, progress: Progress) -> None:
        """Reads everything.

        Args:
            fill: Gives a storage that stays on the device its bytes.
            progress: Called with each tensor's name before it is read.

        Raises:
            OutOfMemoryError: If neither disk nor host memory has room.
        """
        loads, self._loads = self._loads, []
        # Layer by layer, so that what a file is to hold is complete before the next one begins.
        loads.sort(key=lambda each: -1 if each.image is None else each.image.number)
        for image, group in groupby(loads, lambda each: each.image):
            if image is None or image.as_stored or self.cache is None:
                _run(group, progress)
            else:
                self._run_layer(image, list(group), self.cache, fill, progress)

    def put(self, storage: Storage, data: npt.NDArray[Any]) -> bool:
        """Takes the bytes of a storage that comes and goes, or is to be kept.

        Returns:
            Whether that is all that has to be done.
        """
        if self._being_made is not None:
            image, made = self._being_made
            if (begin := image.begins.get(storage)) is not None:
                raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
                made[begin : begin + raw.size] = raw
        elif storage.section is not None:
            storage.section.put(storage, data)
        return storage.section is not None

    def _run_layer(
        self, image: LayerImage, loads: list[_Deferred], cache: WeightCache, fill: Fill,
        progress: Progress,
    ) -> None:  # fmt: skip
        """Takes a layer from the disk, or makes it and keeps it there."""
        kept = cache.read(image)
        if kept is not None:
            for each in loads:
                progress(each.name)
            self._requantization.add(kept.requantized)
            image.fill(kept.data, fill)
            return
        if not self.is_kept:
            _run(loads, progress)
            return
        made = np.zeros(image.nbytes, np.uint8)
        self._being_made, before = (image, made), copy(self._requantization)
        _run(loads, progress)
        self._being_made = None
        mapped = cache.write(image, KeptLayer(made, self._requantization.since(before)))
        if image.section is None:
            return
        if mapped is None:
            self._require_room(image, cache)
        image.fill(made if mapped is None else mapped, fill)

    def _require_room(self, first: LayerImage, cache: WeightCache) -> None:
        """Ends where layers that have no room on the disk have none in host memory, either.

        Raises:
            OutOfMemoryError: If so.
        """
        rest = [i for i in self.images.kept if i.number > first.number]
        needed, room = sum(image.host_bytes for image in rest), available_bytes()
        if room is not None and needed > room:
            raise OutOfMemoryError(
                f"{cache.problem}; for that, too, {needed / MIB:,.0f} MiB of host memory are "
                f"needed, and {room / MIB:,.0f} MiB are free"
            )

    # -- where layers are ----------------------------------------------------------------------

    @cached_property
    def cache(self) -> WeightCache | None:
        """Where layers are kept that are quantized here; None where none are."""
        if sum(image.nbytes for image in self.images.kept) < _LEAST_KEPT:
            return None
        made_from = self._made_from()
        if made_from is None:
            return None
        cache = WeightCache(made_from, self.images.layers.values())
        return cache if self.images.sections or cache.is_there else None

    @cached_property
    def is_kept(self) -> bool:
        """Whether layers that are quantized here have room on the disk, where some come and go."""
        if self.cache is None or not self.images.sections:
            return False
        return self.cache.make_room(self.images.kept)

    @property
    def largest_kept(self) -> int:
        """Bytes of the largest layer that is put together for the disk."""
        return max((image.nbytes for image in self.images.kept), default=0)

    @property
    def problem(self) -> str:
        """Why layers are not kept, where they should be; else empty."""
        return "" if self.cache is None else self.cache.problem

    def host_bytes(self) -> int:
        """Bytes of host memory that the layers take which come and go."""
        return self.images.host_bytes(kept=self.is_kept)

    def mapped_bytes(self) -> int:
        """Bytes of them that are read from files whenever they are needed."""
        whole = sum(section.nbytes for section in self.images.sections)
        return whole - self.host_bytes()


def _run(loads: Iterable[_Deferred], progress: Progress) -> None:
    for each in loads:
        progress(each.name)
        each.load()
