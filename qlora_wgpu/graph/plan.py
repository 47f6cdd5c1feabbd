"""The memory plan: which launches are needed, and which slot each intermediate lives in.

A slot is a whole buffer or image, since WebGPU refuses a buffer that is bound for reading and for
writing in one dispatch even where the ranges are disjoint.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from qlora_wgpu.gpu.device import buffer_bytes, image_bytes
from qlora_wgpu.graph.graph import Graph, Launch
from qlora_wgpu.graph.tensor import Storage, Tensor


@dataclass(frozen=True)
class Plan:
    """A graph with its memory settled, before anything is allocated.

    Attributes:
        launches: Those that lead to a result.
        slots: Bytes of each slot, largest first.
        images: Whether each slot is an image.
        slot_of: The slot of each intermediate.
        storages: What lives outside the slots, in the order of first use.
    """

    launches: tuple[Launch, ...]
    slots: tuple[int, ...]
    images: tuple[bool, ...]
    slot_of: dict[Tensor, int]
    storages: tuple[Storage, ...]

    @property
    def activation_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(
            (image_bytes if image else buffer_bytes)(nbytes)
            for nbytes, image in zip(self.slots, self.images, strict=True)
        )

    @property
    def flops(self) -> int:
        """Floating-point operations of all products."""
        return sum(launch.flops for launch in self.launches)

    def bytes_by_kind(self) -> Counter[str]:
        """Bytes on the device by kind; slots are ``activations``."""
        total: Counter[str] = Counter({"activations": self.activation_bytes})
        for storage in self.storages:
            size = image_bytes if storage.image else buffer_bytes
            total[storage.kind] += size(storage.nbytes)
        return total


def make_plan(graph: Graph, outputs: tuple[Tensor, ...] = ()) -> Plan:
    """Plans a traced graph.

    Args:
        graph: What was traced.
        outputs: Intermediates that are read after the run, and therefore keep their slots.

    Returns:
        A plan with only the launches that lead to an output or to bytes that outlive the run.
    """
    launches = _needed(graph.launches, outputs)
    slots, images, slot_of = _assign_slots(_lifetimes(launches, outputs))
    storages = dict.fromkeys(
        t.storage for launch in launches for t in launch.tensors.values() if t.storage is not None
    )
    return Plan(tuple(launches), tuple(slots), tuple(images), slot_of, tuple(storages))


def _needed(launches: list[Launch], outputs: tuple[Tensor, ...]) -> list[Launch]:
    wanted = set(outputs)
    kept = []
    for launch in reversed(launches):
        if any(t.storage is not None or t in wanted for t in launch.written()):
            kept.append(launch)
            wanted.update(launch.tensors.values())
    return kept[::-1]


def _lifetimes(
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


def _assign_slots(
    lives: dict[Tensor, tuple[int, int]],
) -> tuple[list[int], list[bool], dict[Tensor, int]]:
    """Greedy by size: the largest tensors first, each into the tightest slot that is free."""
    sizes: list[int] = []
    images: list[bool] = []
    taken: list[list[tuple[int, int]]] = []
    slot_of: dict[Tensor, int] = {}
    for tensor in sorted(lives, key=lambda t: -t.nbytes):
        first, last = lives[tensor]
        # Slots come in falling size, so the last one that is free is the tightest.
        for slot in range(len(sizes) - 1, -1, -1):
            free = all(last < a or first > b for a, b in taken[slot])
            if free and images[slot] == tensor.image:
                break
        else:
            slot = len(sizes)
            sizes.append(tensor.nbytes)
            images.append(tensor.image)
            taken.append([])
        taken[slot].append((first, last))
        slot_of[tensor] = slot
    return sizes, images, slot_of
