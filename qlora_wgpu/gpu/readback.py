"""Reading a few bytes back without stopping the queue."""

from __future__ import annotations

from collections import deque
from typing import Any

from qlora_wgpu.gpu.device import Device

READ_AHEAD = 2
"""Copies that may be on their way, where nobody says how many."""


class Readback:
    """Copies of one small buffer, asked for now and looked at later, in order.

    A copy is queued behind the work submitted so far; later work can be submitted before its
    bytes have arrived.
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
        """Allocates room for copies on their way.

        Args:
            device: The device.
            buffer: What is copied.
            nbytes: How much of it.
            depth: How many copies may be on their way.
            counts: Whether their room, which a card has in host memory, counts as the device's.
        """
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
        """Number of copies on their way."""
        return len(self._pending)

    @property
    def full(self) -> bool:
        """Whether ``take`` has to be called before the next ``request``."""
        return not self._free

    def request(self) -> None:
        """Queues a copy; does not wait."""
        staging = self._free.popleft()
        with self._device.driver_call("asking for a result"):
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
