"""The order in which weights are read, layer by layer, and from where: the model, or the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.memory_size import available_bytes
from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.layer_images import Fill, LayerImage, LayerImages
from qlora_wgpu.model.requantization import Requantization
from qlora_wgpu.model.weight_cache import KeptLayer, WeightCache

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
