"""The host's part of a run with offloading: transfers between launches, and their order.

An upload is queued as soon as its buffer is free, so that it overlaps with the preceding launches.
The driver copies queued bytes, so at most two uploads are in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.timing import Readback
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.offload import (
    NUM_BUFFERS,
    OffloadedTensor,
    WeightGroup,
    WeightStream,
    groups_needed,
)
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.mapped_files import check_not_truncated, path_of, read_now

_UNDER_WAY = 2  # maximum uploads, and downloads, in flight


@dataclass(frozen=True)
class HostCallback:
    """An action of the host between two launches."""

    before: int  # the launch before which it is queued
    run: Callable[[], None]


@dataclass
class DiskReadStats:
    """Reads from files on the way to the device."""

    path: str = ""  # the file read last
    nbytes: int = 0  # of all files
    seconds: float = 0.0  # the time that the host waited

    def add(self, path: str, nbytes: int, seconds: float) -> None:
        self.path = path
        self.nbytes += nbytes
        self.seconds += seconds


class OffloadEngine:
    """The host's part of all programs of a model, which run one at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream_buffers: dict[WeightStream, list[Any]] = {}
        self._present: dict[tuple[WeightStream, int], WeightGroup] = {}
        self._uploads: Readback | None = None
        self._downloads: dict[Storage, Readback] = {}
        self._awaited: list[tuple[Readback, OffloadedTensor]] = []
        self.moved = 0  # bytes transferred, both ways
        self.reading = DiskReadStats()

    # -- what a program needs to know --------------------------------------------------------

    def window(self, storage: Storage, offset: int, nbytes: int) -> tuple[Any, int, int]:
        group = storage.group
        assert group is not None
        return self._buffers(group.stream)[group.buffer_index], storage.first_byte + offset, nbytes

    def steps(self, launches: Sequence[Launch]) -> list[HostCallback]:
        needed = groups_needed(launches)
        following = [group for _, group in needed[1:] + needed[:1]]
        steps = [
            HostCallback(at, partial(self._bring, group, after))
            for (at, group), after in zip(needed, following, strict=True)
        ]
        for index, launch in enumerate(launches):
            for name, offloaded in launch.saves.items():
                save = partial(self._save, _storage(launch, name), offloaded)
                steps.append(HostCallback(index + 1, save))
        for at, index in fetches(launches):
            for name, offloaded in launches[index].fetches.items():
                fetch = partial(self._fetch, _storage(launches[index], name), offloaded)
                steps.append(HostCallback(at, fetch))
        if any(offloaded.lasts for launch in launches for offloaded in launch.saves.values()):
            steps.append(HostCallback(len(launches), self._receive_all))
        return sorted(steps, key=lambda step: step.before)

    # -- doing it ----------------------------------------------------------------------------

    def _bring(self, group: WeightGroup, following: WeightGroup) -> None:
        """Uploads a group unless it is on the device."""
        key = group.stream, group.buffer_index
        if self._present.get(key) is group:
            return
        self._present.pop(key, None)
        self._upload(self._buffers(group.stream)[group.buffer_index], group.chunks)
        self._present[key] = group
        following.prefetch()

    def _upload(self, buffer: Any, chunks: Mapping[int, npt.NDArray[np.uint8]]) -> None:
        """Queues bytes for a buffer, after waiting if too many uploads are in flight."""
        uploads = self._fence()
        if uploads.full:
            uploads.take()
        for begin, data in chunks.items():
            self._device.write(buffer, data, begin, self._read)
            self.moved += data.nbytes
        uploads.request()

    def _read(self, chunk: npt.NDArray[Any]) -> None:
        if (path := path_of(chunk)) is None:
            return
        check_not_truncated(chunk)
        begin = time.perf_counter()
        read_now(chunk)
        self.reading.add(path, chunk.nbytes, time.perf_counter() - begin)

    def _save(self, source: Storage, offloaded: OffloadedTensor) -> None:
        readback = self._download(source)
        while readback.full:
            self._receive()
        readback.request()
        self._awaited.append((readback, offloaded))
        self.moved += offloaded.nbytes

    def _fetch(self, target: Storage, offloaded: OffloadedTensor) -> None:
        """Queues the upload of a saved tensor, after waiting until it has arrived."""
        while any(each is offloaded for _, each in self._awaited):
            self._receive()
        assert offloaded.data is not None
        self._upload(target.buffer, {0: offloaded.data})

    def _receive_all(self) -> None:
        while self._awaited:
            self._receive()

    def _receive(self) -> None:
        readback, offloaded = self._awaited.pop(0)
        if offloaded.data is None:
            offloaded.data = np.empty(offloaded.nbytes, np.uint8)
        offloaded.data[:] = np.frombuffer(readback.take(), np.uint8)[: offloaded.nbytes]

    def _buffers(self, stream: WeightStream) -> list[Any]:
        if stream not in self._stream_buffers:
            count = min(len(stream.groups), NUM_BUFFERS)
            self._stream_buffers[stream] = [
                self._device.buffer(stream.buffer_bytes, "staging", "streamed weights", bound=False)
                for _ in range(count)
            ]
        return self._stream_buffers[stream]

    def _fence(self) -> Readback:
        """Words read back after uploads, to know when these have arrived."""
        if self._uploads is None:
            with self._device.memory.uncounted():
                word = self._device.buffer(16, "staging", "a word behind uploads")
            self._uploads = Readback(self._device, word, 16, _UNDER_WAY, counts=False)
        return self._uploads

    def _download(self, source: Storage) -> Readback:
        if source not in self._downloads:
            self._downloads[source] = Readback(
                self._device, source.buffer, source.nbytes, _UNDER_WAY, counts=False
            )
        return self._downloads[source]


def transfer_bytes(plan: Plan) -> int:
    groups = [stream.buffer_bytes for stream in plan.streams]
    up = [p.nbytes for launch in plan.launches for p in launch.fetches.values()]
    down = {
        _storage(launch, name): p.nbytes
        for launch in plan.launches
        for name, p in launch.saves.items()
    }
    return _UNDER_WAY * (max([*groups, *up], default=0) + sum(down.values()))


def _storage(launch: Launch, name: str) -> Storage:
    storage = launch.tensors[name].storage
    assert storage is not None
    return storage


def fetches(launches: Sequence[Launch]) -> list[tuple[int, int]]:
    """``(launch before which it may be fetched, launch that reads it)`` of offloaded tensors.

    Each is fetched when the previous one, which has its own buffer, is read.
    """
    readers = [index for index, launch in enumerate(launches) if launch.fetches]
    return list(zip(readers[:1] + readers[:-1], readers, strict=True))
