"""A plan made ready on a device: buffers, pipelines and bind groups, to be replayed."""

from __future__ import annotations

from typing import Any

from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import ALIGNMENT, Device
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.graph.tensor import Storage, Tensor


class SlotPool:
    """The memory behind the slots of all plans of a model; plans run one at a time and share it."""

    def __init__(self, device: Device) -> None:
        """Starts with no buffer."""
        self._device = device
        self._buffers: list[Any] = []
        self._sizes: list[int] = []
        self._textures: list[bool] = []

    def take(self, plan: Plan) -> list[Any]:
        """Finds a buffer or texture for each of a plan's slots, allocating what the pool lacks."""
        free = sorted(range(len(self._sizes)), key=lambda i: self._sizes[i])
        chosen: list[Any] = []
        # The largest first: those that fit nowhere are new, the rest take the tightest.
        for size, texture in zip(plan.slots, plan.textures, strict=True):
            fits = (i for i in free if self._sizes[i] >= size and self._textures[i] == texture)
            fitting = next(fits, None)
            if fitting is None:
                make = self._device.texture if texture else self._device.buffer
                buffer = make(size, "activations", "an activation slot")
                self._buffers.append(buffer)
                self._sizes.append(size)
                self._textures.append(texture)
            else:
                free.remove(fitting)
                buffer = self._buffers[fitting]
            chosen.append(buffer)
        return chosen


def allocate(device: Device, storage: Storage) -> None:
    """Gives a storage its buffer, filled with its data, unless it has one."""
    if storage.buffer is None:
        make = device.texture if storage.texture else device.buffer
        storage.buffer = make(storage.nbytes, storage.kind, storage.label)
        if storage.data is not None:
            write = device.write_texture if storage.texture else device.write
            write(storage.buffer, storage.data)


class Program:
    """Replays a plan: no allocation, no bind group, no decision in a run.

    Attributes:
        plan: What runs.
        dispatches: ``(pipeline, bind group, workgroups)`` of each launch of the plan.
    """

    def __init__(self, device: Device, plan: Plan, pool: SlotPool) -> None:
        """Allocates what is missing, compiles the shaders and binds everything.

        Args:
            device: Where it will run.
            plan: What will run.
            pool: Where the plan's slots are taken from.

        Raises:
            OutOfMemoryError: If a buffer exceeds the adapter's limits or its memory.
        """
        self.plan = plan
        self._device = device
        for storage in plan.storages:
            allocate(device, storage)
        self._slots = pool.take(plan)
        self._uniforms = self._upload_params()
        offset = 0
        self.dispatches: list[Dispatch] = []
        for launch in plan.launches:
            windows = {name: self._window(tensor) for name, tensor in launch.tensors.items()}
            if launch.params:
                windows["params"] = (self._uniforms, offset, len(launch.params))
                offset += ALIGNMENT
            group = device.bind_group(launch.shader, windows)
            self.dispatches.append((device.pipeline(launch.shader), group, launch.workgroups))

    def _upload_params(self) -> Any:
        blocks = [launch.params for launch in self.plan.launches if launch.params]
        data = b"".join(block + bytes(ALIGNMENT - len(block)) for block in blocks)
        buffer = self._device.buffer(max(len(data), ALIGNMENT), "uniforms", "parameters")
        if data:
            self._device.write(buffer, data)
        return buffer

    def _window(self, tensor: Tensor) -> tuple[Any, int, int]:
        if tensor.storage is not None:
            return tensor.storage.buffer, tensor.offset, tensor.nbytes
        return self._slots[self.plan.slot_of[tensor]], 0, tensor.nbytes

    def run(self) -> None:
        """Submits all dispatches, in pieces; does not wait."""
        size = self._device.dispatches_per_submit
        with self._device.in_turn:
            for start in range(0, len(self.dispatches), size):
                self._device.submit(self._recorded(self.dispatches[start : start + size]))

    def _recorded(self, dispatches: list[Dispatch]) -> Any:
        device = self._device
        with device.driver_call("recording work"):
            encoder = device.raw.create_command_encoder()
            compute = encoder.begin_compute_pass()
            device.backend.record(compute, dispatches)
            compute.end()
            return encoder.finish()

    def read(self, tensor: Tensor) -> memoryview:
        """Waits, and returns a tensor's bytes, padding included."""
        buffer, offset, nbytes = self._window(tensor)
        read = self._device.read_texture if tensor.texture else self._device.read
        return read(buffer, nbytes, offset)
