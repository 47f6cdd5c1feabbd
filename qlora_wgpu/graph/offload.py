"""Offloading: weights that are streamed from the host, and activations that are kept there.

Weights are double-buffered: while the launches that read one group run, the next is uploaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.tensor import WINDOW, Storage
from qlora_wgpu.mapped_files import prefetch

if TYPE_CHECKING:
    from qlora_wgpu.graph.launch import Launch

NUM_BUFFERS = 2  # for what is uploaded; its users take turns

# ---- weights ---------------------------------------------------------------------------------


@dataclass(eq=False)
class WeightStream:
    """The weight groups of a model, which share the buffers in turn."""

    groups: list[WeightGroup] = field(default_factory=list)  # as a forward reads them

    def new_group(self, label: str) -> WeightGroup:
        """Adds a group behind the others."""
        group = WeightGroup(label, self, len(self.groups) % NUM_BUFFERS)
        self.groups.append(group)
        return group

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one of the buffers."""
        return max((group.nbytes for group in self.groups), default=0)

    @property
    def device_bytes(self) -> int:
        """Bytes of all buffers."""
        return min(len(self.groups), NUM_BUFFERS) * self.buffer_bytes


@dataclass(eq=False)
class WeightGroup:
    """Weights that are uploaded together: storages one behind the other in a buffer."""

    label: str  # for messages
    stream: WeightStream
    buffer_index: int  # which of the stream's buffers it takes
    nbytes: int = 0  # of all its storages, gaps included
    # Its bytes by where they begin, once its weights are read; a chunk may be mapped from a file.
    chunks: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)

    def storage(self, label: str, nbytes: int) -> Storage:
        """Adds a storage at its end."""
        storage = Storage(label, "base", nbytes, group=self, first_byte=self.nbytes)
        self.nbytes += -(-nbytes // WINDOW) * WINDOW
        return storage

    def put(self, storage: Storage, data: npt.NDArray[Any]) -> None:
        """Keeps the bytes of one of its storages."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self.chunks[storage.first_byte] = raw

    def prefetch(self) -> None:
        """Lets the operating system read ahead what is in files."""
        for chunk in self.chunks.values():
            prefetch(chunk)

    def show(self, data: npt.NDArray[Any]) -> None:
        """Takes all of its bytes where they are, without a copy."""
        self.chunks = {0: data.reshape(-1).view(np.uint8)}


def groups_needed(launches: Sequence[Launch]) -> list[tuple[int, WeightGroup]]:
    """The groups that launches read, each with the launch before which it may be uploaded.

    That is the one behind the last that reads the group before it in the same buffer.
    """
    needed: list[tuple[int, WeightGroup]] = []
    present: dict[tuple[WeightStream, int], WeightGroup] = {}
    free_from: dict[tuple[WeightStream, int], int] = {}
    for index, launch in enumerate(launches):
        for tensor in launch.tensors.values():
            group = None if tensor.storage is None else tensor.storage.group
            if group is None:
                continue
            key = group.stream, group.buffer_index
            if present.get(key) is not group:
                needed.append((free_from.get(key, 0), group))
                present[key] = group
            free_from[key] = index + 1
    return needed


def steady_state_uploads(launches: Sequence[Launch]) -> list[WeightGroup]:
    """The groups that a run of launches uploads, if a run of the same launches came before it."""
    needed = [group for _, group in groups_needed(launches)]
    last = {(group.stream, group.buffer_index): group for group in needed}
    brought = []
    for group in needed:
        if last[group.stream, group.buffer_index] is not group:
            brought.append(group)
        last[group.stream, group.buffer_index] = group
    return brought


# ---- activations -----------------------------------------------------------------------------


@dataclass(eq=False)
class OffloadedTensor:
    """A tensor's bytes in host memory."""

    name: str  # the tensor's
    nbytes: int
    data: npt.NDArray[np.uint8] | None = None  # once they were downloaded the first time
    lasts: bool = False  # whether they outlive the run, which then ends with all of them here


@dataclass
class StagingBuffers:
    """The buffers that a model's offloaded tensors pass through, whatever the shape of its steps.

    One launch copies a tensor into a buffer that the host reads; another copies it back from one
    that the host has written.
    """

    outgoing: Storage | None = None  # what the host reads
    incoming: list[Storage] = field(default_factory=list)  # what the host writes, in turn

    def download_buffer(self, nbytes: int) -> Storage:
        """The buffer through which a tensor goes to the host."""
        if self.outgoing is None or self.outgoing.nbytes < nbytes:
            self.outgoing = Storage("what goes to the host", "staging", nbytes)
        return self.outgoing

    def upload_buffer(self, nbytes: int, turn: int) -> Storage:
        """The buffer through which the tensor number ``turn`` comes back."""
        if not self.incoming or self.incoming[0].nbytes < nbytes:
            self.incoming = [
                Storage("what comes from the host", "staging", nbytes) for _ in range(NUM_BUFFERS)
            ]
        return self.incoming[turn % NUM_BUFFERS]


@dataclass(frozen=True)
class CheckpointPolicy:
    """What is computed again in the backward, and how."""

    together: int = 1  # layers of a segment, of which only the first one's input is kept
    kept: int = 0  # the last layers that are not recomputed: theirs are freed first
    staging: StagingBuffers | None = None  # through which the inputs are offloaded, if they are
    # Whether outputs that a cheap launch makes from tensors that are kept anyway are recomputed.
    remakes: bool = False
