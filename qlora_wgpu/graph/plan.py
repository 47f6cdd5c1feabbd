"""The memory plan: which launches are needed, and the slot of each intermediate.

A slot is a whole buffer or texture, since WebGPU rejects a buffer that is bound for reading and for
writing in one dispatch even if the ranges are disjoint.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from qlora_wgpu.gpu.limits import ALIGNMENT, memory_bytes
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.offload import WeightStream, steady_state_uploads
from qlora_wgpu.graph.passes import assign_layouts, schedule_late
from qlora_wgpu.graph.rewrite import rewrite
from qlora_wgpu.graph.tensor import Storage, Tensor


@dataclass(frozen=True)
class Plan:
    """A graph with its memory planned, before anything is allocated."""

    launches: tuple[Launch, ...]  # those that contribute to a result
    slots: tuple[int, ...]  # bytes of each slot, largest first
    textures: tuple[bool, ...]  # whether each slot is a texture
    slot_of: dict[Tensor, int]  # the slot of each intermediate
    storages: tuple[Storage, ...]  # storages outside the slots, in the order of first use
    # Whether it may run while another program pauses; then only such plans share its slots.
    apart: bool = False

    @property
    def activation_bytes(self) -> int:
        each = zip(self.slots, self.textures, strict=True)
        return sum(memory_bytes(nbytes, texture=texture) for nbytes, texture in each)

    @property
    def flops(self) -> int:
        return sum(launch.times * launch.flops for launch in self.launches)

    @property
    def memory_traffic(self) -> int:
        """Estimated bytes of device memory that its launches read and write."""
        return sum(launch.times * launch.nbytes for launch in self.launches)

    @property
    def uniform_bytes(self) -> int:
        return ALIGNMENT * sum(launch.times for launch in self.launches if launch.params)

    def bytes_by_kind(self) -> Counter[str]:
        """Bytes on the device by kind; slots are ``activations``."""
        total: Counter[str] = Counter({"activations": self.activation_bytes})
        total += self.storage_bytes()
        for stream in self.streams:
            total["staging"] += stream.device_bytes
        return total

    def storage_bytes(self, other: Plan | None = None) -> Counter[str]:
        """Bytes by kind that stay on the device between runs, without those of another plan."""
        total: Counter[str] = Counter()
        known = set() if other is None else set(other.storages)
        for storage in self.storages:
            if storage.group is None and storage not in known:
                total[storage.kind] += memory_bytes(storage.nbytes, texture=storage.texture)
        return total

    @property
    def streams(self) -> list[WeightStream]:
        groups = (storage.group for storage in self.storages)
        return list(dict.fromkeys(each.stream for each in groups if each is not None))

    @property
    def host_transfer_bytes(self) -> int:
        """Bytes transferred between host and device in a run that follows another of its kind."""
        needed = sum(group.nbytes for group in steady_state_uploads(self.launches))
        copies = (
            p for each in self.launches for p in (*each.saves.values(), *each.fetches.values())
        )
        return needed + sum(offloaded.nbytes for offloaded in copies)

    @property
    def offloaded_bytes(self) -> int:
        return sum(offloaded.nbytes for each in self.launches for offloaded in each.saves.values())


def compile_plan(
    graph: Graph,
    outputs: tuple[Tensor, ...] = (),
    *,
    apart: bool = False,
) -> Plan:
    """Plans a traced graph, dropping launches that do not contribute to an output or a storage."""
    graph.end()
    rewrite(graph, graph.rules, outputs)
    needed = schedule_late(_eliminate_dead_launches(graph, outputs), graph.saturated)
    launches = assign_layouts(needed, graph.profile, graph.max_binding)
    slots, textures, slot_of = _plan_memory(_live_ranges(launches, outputs), launches)
    storages = dict.fromkeys(
        t.storage.whole
        for launch in launches
        for t in launch.tensors.values()
        if t.storage is not None
    )
    return Plan(tuple(launches), tuple(slots), tuple(textures), slot_of, tuple(storages), apart)


def _eliminate_dead_launches(graph: Graph, outputs: tuple[Tensor, ...]) -> list[Launch]:
    read = set(outputs)
    kept = []
    for launch in reversed(graph.launches):
        results = (t for t in launch.written() if t is not graph.saturated)
        if any(t.storage is not None or t in read for t in results):
            kept.append(launch)
            read.update(launch.tensors.values())
    return kept[::-1]


def _live_ranges(
    launches: list[Launch], outputs: tuple[Tensor, ...]
) -> dict[Tensor, tuple[int, int]]:
    lives: dict[Tensor, tuple[int, int]] = {}
    for index, launch in enumerate(launches):
        for tensor in launch.tensors.values():
            if tensor.storage is None:
                first, _ = lives.get(tensor, (index, index))
                lives[tensor] = (first, index)
    for tensor in outputs:
        if tensor in lives:
            lives[tensor] = (lives[tensor][0], len(launches))
    return lives


def _plan_memory(
    lives: dict[Tensor, tuple[int, int]], launches: list[Launch]
) -> tuple[list[int], list[bool], dict[Tensor, int]]:
    """Greedy by size: the largest tensors first, each into the tightest free slot.

    Among tensors of equal size, long-lived ones come first: short-lived ones fit between them.
    Lifetimes are counted in launches that are not repetitions, since a graph that is traced for its
    sizes lacks most of those.
    """
    passed = [0, *accumulate(not launch.repeats for launch in launches)]

    def size_and_length(item: tuple[Tensor, tuple[int, int]]) -> tuple[int, int]:
        tensor, (first, last) = item
        return tensor.nbytes, passed[last] - passed[first]

    sizes: list[int] = []
    textures: list[bool] = []
    slot_of: dict[Tensor, int] = {}
    # Sets of slots are the bits of an integer: those in use during a launch, and the textures.
    taken = _IntervalTree(max((last for _, last in lives.values()), default=0) + 1)
    of_kind = {False: 0, True: 0}
    for tensor, (first, last) in sorted(lives.items(), key=size_and_length, reverse=True):
        # Slots are in descending order of size, so the last free one is the tightest.
        slot = (of_kind[tensor.texture] & ~taken.during(first, last)).bit_length() - 1
        if slot < 0:
            slot = len(sizes)
            sizes.append(tensor.nbytes)
            textures.append(tensor.texture)
            of_kind[tensor.texture] |= 1 << slot
        taken.add(first, last, 1 << slot)
        slot_of[tensor] = slot
    return sizes, textures, slot_of


class _IntervalTree:
    """A segment tree over launches, whose values are sets as bits of integers."""

    def __init__(self, length: int) -> None:
        self._leaves = 1 << (length - 1).bit_length()
        self._whole = [0] * (2 * self._leaves)  # added to every launch below a node
        self._some = [0] * (2 * self._leaves)  # added to some launch below a node

    def add(self, first: int, last: int, bits: int) -> None:
        whole, some = self._whole, self._some
        left, right = first + self._leaves, last + self._leaves + 1
        ends = left, right - 1
        while left < right:
            if left & 1:
                whole[left] |= bits
                some[left] |= bits
                left += 1
            if right & 1:
                right -= 1
                whole[right] |= bits
                some[right] |= bits
            left, right = left >> 1, right >> 1
        for node in ends:
            while node := node >> 1:
                some[node] |= bits

    def during(self, first: int, last: int) -> int:
        """The union over all launches from ``first`` to ``last``."""
        whole, some = self._whole, self._some
        left, right = first + self._leaves, last + self._leaves + 1
        found = 0
        for node in (left, right - 1):
            while node:
                found |= whole[node]
                node >>= 1
        while left < right:
            if left & 1:
                found |= some[left]
                left += 1
            if right & 1:
                right -= 1
                found |= some[right]
            left, right = left >> 1, right >> 1
        return found
