"""Where weights are: on the device, streamed with their layer, or in host memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.device import Device, bytes_of
from qlora_wgpu.gpu.memory import available_bytes
from qlora_wgpu.graph.offload import WeightGroup, WeightStream
from qlora_wgpu.graph.program import allocate
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.checkpoint_reader import CheckpointReader
from qlora_wgpu.model.weight_cache import FlatLayer, KeptLayer, WeightCache
from qlora_wgpu.ops.logits import block_rows
from qlora_wgpu.ops.modules import DenseExperts, DenseMatrix, HostEmbedding, StreamedMatrix
from qlora_wgpu.ops.quantized import QuantizedMatrix

_LEAST_KEPT = 64 * MIB  # less than that is quantized within a second

Progress = Callable[[str], None]
Held = Tensor | HostEmbedding | StreamedMatrix | DenseMatrix | DenseExperts | QuantizedMatrix
Filled = tuple[Storage, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Weight:
    """A row of a model's table: one tensor of the base, or several that are one on the device."""

    name: str  # shown before it is read
    parts: Sequence[tuple[str, tuple[int, ...]]]  # the tensors' names (Hugging Face's) and shapes
    held: Held  # its form for ops
    read: Callable[[CheckpointReader], Iterable[Filled]]
    layer: FlatLayer | None = None  # the layer whose storages it is among
    offset: float = 0.0  # added to the stored values


class WeightPlacement:
    """Memory for weights, and the order in which it is filled.

    Weights are read one after another, layer by layer, so that host memory stays near one tensor.
    Layers that are quantized here and streamed are cached on disk.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        kept_as: str,
        *,
        textures: bool,
        first_streamed: int,
        shared: Collection[str] = (),
    ) -> None:
        self.stream = WeightStream()
        self.on_host: dict[str, HostEmbedding] = {}  # matrices in host memory, by kind
        self._reader = reader
        self._kept_as = kept_as
        self._textures, self._first_streamed = textures, first_streamed
        self._shared = shared  # modules that several layers use, which are never streamed
        self._layers: dict[int, FlatLayer] = {}
        self._largest_load = 0
        self._device: Device | None = None
        self._being_made: tuple[FlatLayer, npt.NDArray[np.uint8]] | None = None

    def layer_of(self, module: str) -> FlatLayer | None:
        number = layer_number(module)
        if number is None:
            return None
        if number >= self._first_streamed and module.removesuffix(".weight") in self._shared:
            return None
        if number not in self._layers:
            streamed = number >= self._first_streamed
            group = self.stream.new_group(f"layer {number}") if streamed else None
            self._layers[number] = FlatLayer(number, group)
        return self._layers[number]

    def storage(self, module: str, label: str, nbytes: int, most: int = 0) -> Storage:
        """Memory for a part of a module, which may be streamed with its layer.

        Otherwise it shares a storage of ``most`` bytes with its neighbours in the layer.
        """
        layer = self.layer_of(module)
        if layer is None:
            return Storage(label, "base", nbytes)
        return layer.storage(label, nbytes, most)

    def dense_storage(self, name: str, nbytes: int) -> Storage:
        if self._textures:  # a texture cannot be a window of a buffer
            return Storage(name, "base", nbytes, texture=True)
        return self.storage(name, name, nbytes)

    def dense_layer_of(self, name: str) -> FlatLayer | None:
        return None if self._textures else self.layer_of(name)

    def expect_load(self, nbytes: int) -> None:
        self._largest_load = max(self._largest_load, nbytes)

    # -- reading -------------------------------------------------------------------------------

    def load(
        self,
        table: Iterable[Weight],
        device: Device,
        progress: Progress = lambda name: None,
    ) -> None:
        """Reads and uploads all weights; raises an ``OutOfMemoryError`` if one does not fit."""
        self._device = device
        # Layer by layer, so that one layer's file is complete before the next one begins.
        rows = sorted(table, key=lambda each: -1 if each.layer is None else each.layer.number)
        for layer, weights in groupby(rows, lambda each: each.layer):
            if layer is None or layer.as_stored or self._cache is None:
                self._read(weights, progress)
            else:
                self._load_layer(layer, list(weights), self._cache, progress)
        self._reader.requantization.warn()

    def _read(self, weights: Iterable[Weight], progress: Progress) -> None:
        for weight in weights:
            progress(weight.name)
            for storage, data in weight.read(self._reader):
                self._fill(storage, data)

    def _fill(self, storage: Storage, data: npt.NDArray[Any]) -> None:
        """Gives a storage its bytes: on the device, in its group, or in the layer's image."""
        if self._being_made is not None:
            layer, made = self._being_made
            if (begin := layer.begins.get(storage)) is not None:
                raw = bytes_of(data)
                made[begin : begin + raw.size] = raw
        elif storage.group is not None:
            storage.group.put(storage, data)
        if storage.group is None:
            self._upload(storage, data)

    def _upload(self, storage: Storage, data: npt.NDArray[Any]) -> None:
        assert self._device is not None
        storage.data = data
        allocate(self._device, storage)
        storage.data = None

    def _load_layer(
        self, layer: FlatLayer, weights: list[Weight], cache: WeightCache, progress: Progress
    ) -> None:
        """Reads a layer from the disk cache, or quantizes it and writes it there."""
        moved = self._reader.requantization
        kept = cache.read(layer)
        if kept is not None:
            for each in weights:
                progress(each.name)
            moved.add(kept.requantized)
            layer.fill(kept.data, self._upload)
            return
        if not self._is_kept:
            self._read(weights, progress)
            return
        made = np.zeros(layer.nbytes, np.uint8)
        self._being_made, before = (layer, made), copy(moved)
        self._read(weights, progress)
        self._being_made = None
        mapped = cache.write(layer, KeptLayer(made, moved.since(before)))
        if layer.group is None:
            return
        if mapped is None:
            self._require_room(layer, cache)
        layer.fill(made if mapped is None else mapped, self._upload)

    def _require_room(self, first: FlatLayer, cache: WeightCache) -> None:
        """Refuses layers that fit neither on the disk nor in host memory."""
        rest = [layer for layer in self._made_here if layer.number > first.number]
        needed, room = sum(layer.host_bytes for layer in rest), available_bytes()
        if room is not None and needed > room:
            raise OutOfMemoryError(
                f"{cache.problem}; host memory has only {room / MIB:,.0f} MiB free of the "
                f"{needed / MIB:,.0f} MiB needed"
            )

    @property
    def _made_here(self) -> list[FlatLayer]:
        return [layer for layer in self._layers.values() if not layer.as_stored]

    @cached_property
    def _cache(self) -> WeightCache | None:
        if sum(layer.nbytes for layer in self._made_here) < _LEAST_KEPT:
            return None
        made_from = self._reader.made_from(self._kept_as) if self._kept_as else None
        if made_from is None:
            return None
        cache = WeightCache(made_from, self._layers.values())
        return cache if self._groups or cache.is_there else None

    @cached_property
    def _is_kept(self) -> bool:
        """Whether the streamed layers that are quantized here fit on the disk, if there are any."""
        if self._cache is None or not self._groups:
            return False
        return self._cache.make_room(self._made_here)

    # -- what they take ------------------------------------------------------------------------

    @property
    def _groups(self) -> list[WeightGroup]:
        groups = (layer.group for layer in self._layers.values())
        return [group for group in groups if group is not None]

    @property
    def group_bytes(self) -> list[int]:
        return [group.nbytes for group in self._groups]

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes on the device of each layer's resident weights that could be streamed."""
        return [layer.device_bytes for layer in self._layers.values()]

    @property
    def head_block_bytes(self) -> list[int]:
        layers = self._groups
        return [each.nbytes for each in self.stream.groups if each not in layers]

    @property
    def problem(self) -> str:
        """Why layers that should be cached on disk are not; else empty."""
        return "" if self._cache is None else self._cache.problem

    @property
    def loading_bytes(self) -> int:
        if not self._is_kept:
            return self._largest_load
        return self._largest_load + max((each.nbytes for each in self._made_here), default=0)

    def host_bytes(self) -> Counter[str]:
        on_host = self.on_host.items()
        memory = Counter({kind: each.nbytes for kind, each in on_host if not each.as_stored})
        memory["streamed weights"] = self._streamed_bytes
        return memory

    @property
    def _streamed_bytes(self) -> int:
        layers = (i for i in self._layers.values() if i.as_stored or not self._is_kept)
        return sum(layer.host_bytes for layer in layers)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the weights that are read from files on demand."""
        mapped = sum(each.nbytes for each in self.on_host.values() if each.as_stored)
        return mapped + sum(self.group_bytes) - self._streamed_bytes


def layer_number(module: str) -> int | None:
    found = re.search(r"\.(\d+)\.", module)
    return None if found is None else int(found[1])


def row_pieces(rows: int, most: int) -> Iterator[tuple[int, int]]:
    for row0 in range(0, rows, most):
        yield row0, min(most, rows - row0)


def streamed_matrix(
    name: str, host: HostEmbedding, stream: WeightStream, max_binding: int, block: int
) -> StreamedMatrix:
    """A matrix in blocks of at most ``block`` rows, each a weight group of the stream.

    The stream's last group should not be in use together with the first block.
    """
    row_bytes = matrix("", 1, host.columns, host.dtype).nbytes
    blocks: list[tuple[int, Tensor]] = []
    for row0, count in row_pieces(host.rows, block_rows(row_bytes, max_binding, block)):
        group = stream.new_group(f"{name} from row {row0}")
        storage = group.storage(name, count * row_bytes)
        blocks.append((row0, matrix(name, count, host.columns, host.dtype, storage)))
    return StreamedMatrix(host.rows, host.columns, tuple(blocks), host)


def fill(streamed: StreamedMatrix, values: npt.NDArray[Any]) -> None:
    """Gives a streamed matrix views of its rows (rows, padded columns)."""
    streamed.host.values = values
    for row0, block in streamed.blocks:
        assert block.storage is not None and block.storage.group is not None
        block.storage.group.show(values[row0 : row0 + block.rows])
