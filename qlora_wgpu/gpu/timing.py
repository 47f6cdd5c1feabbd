"""Asynchronous readback, and timing by the device's clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device

READ_AHEAD = 2
"""The default number of copies in flight."""


class Readback:
    """Copies of one small buffer, requested now and read later, in order.

    A copy is queued after the work submitted so far; later work can be submitted before it has
    arrived.
    """

    def __init__(
        self,
        device: Device,
        buffer: Any,
        nbytes: int,
        depth: int = READ_AHEAD,
        *,
        counts: bool = True,
    ) -> None:
        usage = device.backend.module.BufferUsage
        flags = usage.COPY_DST | usage.MAP_READ
        self._device = device
        self._source = buffer
        self._nbytes = nbytes
        with device.driver_call("allocating room for results"):
            self._free = deque(
                device.raw.create_buffer(size=nbytes, usage=flags, label="readback")
                for _ in range(depth)
            )
        self._pending: deque[tuple[Any, Any]] = deque()
        for buffer in self._free if counts else ():
            device.memory.add("inputs", nbytes, buffer)

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def full(self) -> bool:
        """Whether ``take`` must be called before the next ``request``."""
        return not self._free

    def request(self) -> None:
        """Queues a copy; does not wait."""
        staging = self._free.popleft()
        with self._device.driver_call("requesting a result"):
            encoder = self._device.raw.create_command_encoder()
            encoder.copy_buffer_to_buffer(self._source, 0, staging, 0, self._nbytes)
            self._device.submit(encoder.finish())
            self._pending.append((staging, staging.map_async("READ")))

    def take(self) -> bytes:
        """The bytes of the oldest copy; waits for it if it has not arrived."""
        staging, promise = self._pending.popleft()
        with self._device.driver_call("waiting for a result"):
            promise.sync_wait()
            data = bytes(staging.read_mapped())
            staging.unmap()
        self._free.append(staging)
        return data


_TICK_BYTES = 8


def has_timestamps(device: Device) -> bool:
    return "timestamp-query" in device.features


class Timestamps:
    """Two timestamp queries for each of some dispatches."""

    def __init__(self, device: Device, most: int) -> None:
        """Creates the queries; the device must support timestamps (``has_timestamps``)."""
        usage = device.backend.module.BufferUsage
        self._device = device
        self._queries = device.raw.create_query_set(type="timestamp", count=2 * most)
        self._resolved = device.raw.create_buffer(
            size=2 * most * _TICK_BYTES, usage=usage.QUERY_RESOLVE | usage.COPY_SRC
        )
        self._tick = 1e-9 * device.backend.timestamp_period(device.raw)

    def seconds(
        self, dispatches: Sequence[Dispatch], ahead: Callable[[], object] = lambda: None
    ) -> list[float]:
        """Runs dispatches in one submit, waits, and returns the time of each."""
        device, count = self._device, 2 * len(dispatches)
        with device.driver_call("recording work"):
            encoder = device.raw.create_command_encoder()
            for index, dispatch in enumerate(dispatches):
                compute = encoder.begin_compute_pass(
                    timestamp_writes={
                        "query_set": self._queries,
                        "beginning_of_pass_write_index": 2 * index,
                        "end_of_pass_write_index": 2 * index + 1,
                    }
                )
                device.backend.record(compute, [dispatch])
                compute.end()
            encoder.resolve_query_set(self._queries, 0, count, self._resolved, 0)
            commands = encoder.finish()
        ahead()
        device.submit(commands)
        ticks = np.frombuffer(device.read(self._resolved, count * _TICK_BYTES), np.uint64)
        begins, ends = ticks.astype(np.float64).reshape(-1, 2).T
        # Some GPUs start a pass before the previous one has ended: overlaps count once.
        begins = np.maximum(begins, np.concatenate([begins[:1], ends[:-1]]))
        # Some drivers' clocks go back slightly between two readings.
        return [float(each) for each in np.maximum(ends - begins, 0.0) * self._tick]
