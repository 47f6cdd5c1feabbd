"""Plans on a device, ready for replay: buffers, pipelines and bind groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from qlora_wgpu.gpu.backend import Dispatch
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.limits import ALIGNMENT, memory_bytes
from qlora_wgpu.graph.host_callbacks import HostCallback, OffloadEngine
from qlora_wgpu.graph.launch import GraphError, Launch
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.graph.submission import (
    ProfiledSubmission,
    TimedDispatch,
    cut,
    doubling_chunks,
    encode,
    parts_needed,
    split_grid,
)
from qlora_wgpu.graph.tensor import Storage, Tensor

_CHUNK = 16  # dispatches between possible pauses, if submits are not split by time
_Kind = tuple[bool, bool]  # of a slot: whether it is a texture, and whether its plan is ``apart``

# ---- memory ----------------------------------------------------------------------------------


class BufferPool:
    """The memory for the slots of all plans of a model, which run one at a time and share it."""

    def __init__(self, device: Device) -> None:
        self.traffic = OffloadEngine(device)  # the transfers between host and device
        self._device = device
        self._buffers: list[Any] = []
        self._sizes: list[int] = []
        self._kinds: list[_Kind] = []
        self.runs = 0  # number of runs started, without those of plans that are ``apart``

    def take(self, plan: Plan) -> list[Any]:
        """Assigns a buffer or texture to each of a plan's slots, allocating missing ones."""
        chosen = []
        for index in _assign_buffers(plan, self._sizes, self._kinds):
            if index == len(self._buffers):
                is_texture, _ = self._kinds[index]
                make = self._device.texture if is_texture else self._device.buffer
                self._buffers.append(make(self._sizes[index], "activations", "an activation slot"))
            chosen.append(self._buffers[index])
        return chosen


def _assign_buffers(plan: Plan, sizes: list[int], kinds: list[_Kind]) -> Iterator[int]:
    """Yields the index of each slot's buffer; missing ones are added to the lists."""
    free = sorted(range(len(sizes)), key=lambda i: sizes[i])
    # The largest slot first; each takes the tightest free buffer, or a new one.
    for size, texture in zip(plan.slots, plan.textures, strict=True):
        kind = texture, plan.apart
        fits = (i for i in free if sizes[i] >= size and kinds[i] == kind)
        index = next(fits, None)
        if index is None:
            index = len(sizes)
            sizes.append(size)
            kinds.append(kind)
        else:
            free.remove(index)
        yield index


def pool_bytes(plans: Sequence[Plan]) -> int:
    """Bytes of the slots of plans that share a pool, in the order of their programs' creation."""
    sizes: list[int] = []
    kinds: list[_Kind] = []
    for plan in plans:
        for _ in _assign_buffers(plan, sizes, kinds):
            pass
    each = zip(sizes, kinds, strict=True)
    return sum(memory_bytes(nbytes, texture=kind[0]) for nbytes, kind in each)


def allocate(device: Device, storage: Storage) -> None:
    """Allocates and fills a storage's buffer, unless it has one or is streamed.

    For a part of a larger storage, the larger one is allocated.
    """
    whole = storage.whole
    if whole.group is not None or whole.on_host is not None:
        return
    if whole.buffer is not None:
        _fill_part(device, storage)
        return
    if whole.texture:
        whole.buffer = device.texture(whole.nbytes, whole.kind, whole.label)
    else:
        whole.buffer = device.buffer(whole.nbytes, whole.kind, whole.label)
    if whole.data is not None:
        write = device.write_texture if whole.texture else device.fill
        write(whole.buffer, whole.data)
    for part in whole.parts:
        _fill_part(device, part)
    whole.parts.clear()  # reference cycles would delay freeing


def _fill_part(device: Device, part: Storage) -> None:
    if part.within is not None and part.data is not None:
        device.fill(part.within.buffer, part.data, part.first_byte)


# ---- running ---------------------------------------------------------------------------------


class Program:
    """Replays a plan, without allocations, bind groups or decisions after the first run.

    If the device limits the time of a submit, the first run is measured, and later ones are split
    into submits accordingly.
    """

    def __init__(self, device: Device, plan: Plan, pool: BufferPool) -> None:
        if any(launch.times > 1 for launch in plan.launches):
            raise GraphError("a plan traced for its sizes cannot run")
        self.plan = plan
        self._device = device
        for storage in plan.storages:
            allocate(device, storage)
        self._pool = pool
        self._slots = pool.take(plan)
        self._traffic = pool.traffic
        self._host_steps = pool.traffic.steps(plan.launches)
        self._uniforms: list[Any] = []
        self.dispatches = self._bound(plan.launches)  # one per launch
        self._parts: dict[tuple[int, int], list[Dispatch]] = {}
        self._submits: list[list[Dispatch] | HostCallback] | None = None
        self._took: list[float] | None = None
        if not device.pace.is_bounded:
            whole = [
                TimedDispatch(i, dispatch, "", 0, 0, 0.0)
                for i, dispatch in enumerate(self.dispatches)
            ]
            self._submits = list(self._in_order(whole, math.inf))

    def _bound(self, launches: Sequence[Launch]) -> list[Dispatch]:
        uniforms = self._upload_params(launches)
        self._uniforms.append(uniforms)
        offset = 0
        dispatches: list[Dispatch] = []
        for launch in launches:
            windows = {name: self._window(tensor) for name, tensor in launch.tensors.items()}
            if launch.params:
                windows["params"] = (uniforms, offset, len(launch.params))
                offset += ALIGNMENT
            group = self._device.bind_group(launch.shader, windows)
            dispatches.append((self._device.pipeline(launch.shader), group, launch.workgroups))
        return dispatches

    def _upload_params(self, launches: Sequence[Launch]) -> Any:
        blocks = [launch.params for launch in launches if launch.params]
        data = b"".join(block + bytes(ALIGNMENT - len(block)) for block in blocks)
        buffer = self._device.buffer(max(len(data), ALIGNMENT), "uniforms", "parameters")
        if data:
            self._device.write(buffer, data)
        return buffer

    def _window(self, tensor: Tensor) -> tuple[Any, int, int]:
        storage = tensor.storage
        if storage is not None and storage.group is not None:
            return self._traffic.window(storage, tensor.offset, tensor.nbytes)
        if storage is not None:
            return storage.whole.buffer, storage.first_byte + tensor.offset, tensor.nbytes
        return self._slots[self.plan.slot_of[tensor]], 0, tensor.nbytes

    def run(self) -> None:
        """Submits all dispatches; waits only if the run is measured."""
        with self._device.in_turn:
            self._pool.runs += not self.plan.apart
            if self._submits is None:
                self._took = self._measured()
                self._submits = self._cut(self._took)
                return
            for each in self._submits:
                if isinstance(each, HostCallback):
                    each.run()
                else:
                    self._device.submit(self._recorded(each))

    def begin(self) -> list[Dispatch] | None:
        """All dispatches of a run that starts now, for a submit shared with other programs.

        None if the host has to act in between, or if they are split by time.
        """
        if self._device.pace.is_bounded or self._host_steps:
            return None
        self._pool.runs += not self.plan.apart
        return self.dispatches

    def run_preemptible(self) -> Iterator[None]:
        """Like ``run``, but waits and yields after every few dispatches.

        Programs of plans that are ``apart`` may run in between. If any other did, or if the host
        has to act within the run, everything is run again without pauses.
        """
        if self._submits is None or self._host_steps:
            self.run()
            return
        self._pool.runs += 1
        own = self._pool.runs
        for submit in self._submits:
            assert not isinstance(submit, HostCallback)
            size = len(submit) if self._device.pace.is_bounded else _CHUNK
            for first in range(0, len(submit), size):
                if self._pool.runs != own:
                    self.run()
                    return
                with self._device.in_turn:
                    self._device.submit(self._recorded(submit[first : first + size]))
                    self._device.read(self._uniforms[0], 4)
                yield

    @property
    def pieces(self) -> list[list[Dispatch]]:
        """The dispatches of each launch: parts of its grid if it takes too long.

        The time is measured in the first run, and estimated before.
        """
        took = self._took or [self._guess(launch) for launch in self.plan.launches]
        return [[piece.dispatch for piece in self._pieces(*each)] for each in enumerate(took)]

    def read(self, tensor: Tensor) -> memoryview:
        """Waits, and returns a tensor's bytes, padding included."""
        buffer, offset, nbytes = self._window(tensor)
        read = self._device.read_texture if tensor.texture else self._device.read
        return read(buffer, nbytes, offset)

    # -- submits -----------------------------------------------------------------------------

    def _measured(self) -> list[float]:
        """Runs everything, submit by submit, and returns the time of each launch."""
        submits = ProfiledSubmission(self._device, self._recorded, len(self.plan.launches))
        for begin, end, steps in self._spans():
            for step in steps:
                step.run()
            for index in range(begin, end):
                for piece in self._pieces(index, self._guess(self.plan.launches[index])):
                    submits.add(piece)
            submits.run()
        return submits.took

    def _guess(self, launch: Launch) -> float:
        return self._device.pace.seconds(launch.path, launch.flops, launch.nbytes)

    def _cut(self, seconds: Sequence[float]) -> list[list[Dispatch] | HostCallback]:
        """All dispatches split into submits, given the time of each launch."""
        pieces = [piece for i, took in enumerate(seconds) for piece in self._pieces(i, took)]
        return list(self._in_order(pieces, self._device.pace.limit))

    def _in_order(
        self, pieces: Sequence[TimedDispatch], limit: float
    ) -> Iterator[list[Dispatch] | HostCallback]:
        for begin, end, steps in self._spans():
            yield from steps
            here = [piece for piece in pieces if begin <= piece.index < end]
            seconds = [piece.seconds for piece in here]
            for each in cut(seconds, limit, self._device.dispatches_per_submit):
                yield [piece.dispatch for piece in here[each]]

    def _spans(self) -> Iterator[tuple[int, int, list[HostCallback]]]:
        """Ranges of launches without actions of the host, and its actions before them."""
        bounds = sorted({0, len(self.plan.launches), *(s.before for s in self._host_steps)})
        for begin, end in pairwise([*bounds, bounds[-1]]):
            yield begin, end, [step for step in self._host_steps if step.before == begin]

    def _pieces(self, index: int, seconds: float) -> Iterator[TimedDispatch]:
        launch = self.plan.launches[index]
        count = parts_needed(seconds, self._device.pace.limit) if launch.has_parts else 1
        dispatches = [self.dispatches[index]] if count == 1 else self._in_parts(index, count)
        share = 1 / len(dispatches)
        flops, nbytes = round(launch.flops * share), round(launch.nbytes * share)
        for dispatch in dispatches:
            yield TimedDispatch(index, dispatch, launch.path, flops, nbytes, seconds * share)

    def _in_parts(self, index: int, count: int) -> list[Dispatch]:
        if (index, count) not in self._parts:
            launch = self.plan.launches[index]
            parts = [launch.part(*box) for box in split_grid(launch.workgroups, count)]
            self._parts[index, count] = self._bound(parts)
        return self._parts[index, count]

    def _recorded(self, dispatches: list[Dispatch]) -> Any:
        return encode(self._device, dispatches)


def submit_batched(device: Device, programs: Sequence[Program]) -> None:
    """Runs programs in order, like ``run`` of each, but with fewer submits.

    A submit costs the host as much time as about a hundred dispatches. The first one has at most
    ``dispatches_per_submit``, so that the device starts early, and each further one twice as many,
    which are encoded while it computes. Programs that are split by time, or within which the host
    has to act, run by themselves.
    """
    with device.in_turn:
        pending: list[Dispatch] = []
        for program in programs:
            dispatches = program.begin()
            if dispatches is None:
                _submit(device, pending)
                pending = []
                program.run()
            else:
                pending += dispatches
        _submit(device, pending)


def _submit(device: Device, dispatches: Sequence[Dispatch]) -> None:
    for each in doubling_chunks(dispatches, device.dispatches_per_submit):
        device.submit(encode(device, each))
