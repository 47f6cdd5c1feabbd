"""Offloading: weights that are streamed from the host, and activations that are stored there.

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

NUM_BUFFERS = 2  # for uploads, which take turns

# ---- weights ---------------------------------------------------------------------------------


@dataclass(eq=False)
class WeightStream:
    """The weight groups of a model, which take turns in the buffers."""

    groups: list[WeightGroup] = field(default_factory=list)  # in the order of the forward pass

    def new_group(self, label: str) -> WeightGroup:
        group = WeightGroup(label, self, len(self.groups) % NUM_BUFFERS)
        self.groups.append(group)
        return group

    @property
    def buffer_bytes(self) -> int:
        return max((group.nbytes for group in self.groups), default=0)

    @property
    def device_bytes(self) -> int:
        return min(len(self.groups), NUM_BUFFERS) * self.buffer_bytes


@dataclass(eq=False)
class WeightGroup:
    """Weights that are uploaded together: adjacent storages in a buffer."""

    label: str  # for messages
    stream: WeightStream
    buffer_index: int  # its buffer of the stream
    nbytes: int = 0  # of all storages, gaps included
    # Its bytes by offset, once its weights are read; a chunk may be mapped from a file.
    chunks: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)

    def storage(self, label: str, nbytes: int) -> Storage:
        storage = Storage(label, "base", nbytes, group=self, first_byte=self.nbytes)
        self.nbytes += -(-nbytes // WINDOW) * WINDOW
        return storage

    def put(self, storage: Storage, data: npt.NDArray[Any]) -> None:
        """Sets the bytes of one of its storages."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self.chunks[storage.first_byte] = raw

    def prefetch(self) -> None:
        """Asks the operating system to read mapped files ahead."""
        for chunk in self.chunks.values():
            prefetch(chunk)

    def show(self, data: npt.NDArray[Any]) -> None:
        """Sets all of its bytes without a copy."""
        self.chunks = {0: data.reshape(-1).view(np.uint8)}


def groups_needed(launches: Sequence[Launch]) -> list[tuple[int, WeightGroup]]:
    """The groups that launches read, each with the launch before which it may be uploaded.

    That is the launch after the last one that reads the previous group in the same buffer.
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
    """The groups that a run uploads if it follows a run of the same launches."""
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
    data: npt.NDArray[np.uint8] | None = None  # after the first download
    lasts: bool = False  # whether they outlive the run, which then ends after the download


@dataclass
class StagingBuffers:
    """The buffers for a model's offloaded tensors, for steps of all shapes.

    One launch copies a tensor into a buffer that the host reads; another copies it back from a
    buffer that the host has written.
    """

    outgoing: Storage | None = None  # read by the host
    incoming: list[Storage] = field(default_factory=list)  # written by the host, in turn

    def download_buffer(self, nbytes: int) -> Storage:
        if self.outgoing is None or self.outgoing.nbytes < nbytes:
            self.outgoing = Storage("what goes to the host", "staging", nbytes)
        return self.outgoing

    def upload_buffer(self, nbytes: int, turn: int) -> Storage:
        if not self.incoming or self.incoming[0].nbytes < nbytes:
            self.incoming = [
                Storage("what comes from the host", "staging", nbytes) for _ in range(NUM_BUFFERS)
            ]
        return self.incoming[turn % NUM_BUFFERS]


@dataclass(frozen=True)
class CheckpointPolicy:
    """What is recomputed in the backward pass, and how."""

    together: int = 1  # layers per segment, of which only the first one's input is kept
    kept: int = (
        0  # number of last layers that are not recomputed: their activations are freed first
    )
    staging: StagingBuffers | None = None  # for offloading the inputs, if they are
    # Whether outputs of cheap launches from tensors that are kept anyway are recomputed.
    remakes: bool = False
