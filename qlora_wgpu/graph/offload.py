"""Offloading: weights and activations that wait in host memory, and what the host does meanwhile.

A section's storages lie one behind the other in one of two buffers, which all sections of a stream
share in turns: while the launches of one run, the next is brought. The host keeps all of them, in
its memory or in files.

Copies stand in between: one launch puts a tensor into a buffer that the host reads, another takes
it from one that the host has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.tensor import WINDOW, Storage
from qlora_wgpu.mapped_files import expect

if TYPE_CHECKING:
    from qlora_wgpu.graph.launch import Launch

NUM_BUFFERS = 2  # buffers that sections take turns in


@dataclass(eq=False)
class WeightStream:
    """The sections of a model."""

    # In the order in which a forward reads them
    sections: list[WeightGroup] = field(default_factory=list)

    def new_section(self, label: str) -> WeightGroup:
        """A section behind those that there are."""
        section = WeightGroup(label, self, len(self.sections) % NUM_BUFFERS)
        self.sections.append(section)
        return section

    @property
    def place_bytes(self) -> int:
        """Bytes of each of the buffers."""
        return max((section.nbytes for section in self.sections), default=0)

    @property
    def device_bytes(self) -> int:
        """Bytes of both."""
        return min(len(self.sections), NUM_BUFFERS) * self.place_bytes


@dataclass(eq=False)
class WeightGroup:
    """Storages that come and go together."""

    label: str  # for messages
    stream: WeightStream  # what it is a section of
    place: int  # which of the buffers it takes
    nbytes: int = 0  # bytes of all its storages, gaps included
    # These bytes by where they begin, once its weights are read. A piece may be a file's
    pieces: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)

    def storage(self, label: str, nbytes: int) -> Storage:
        """A storage at its end."""
        storage = Storage(label, "base", nbytes, section=self, first_byte=self.nbytes)
        self.nbytes += -(-nbytes // WINDOW) * WINDOW
        return storage

    def put(self, storage: Storage, data: npt.NDArray[Any]) -> None:
        """Keeps the bytes of one of its storages."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self.pieces[storage.first_byte] = raw

    def expect(self) -> None:
        """Lets the system read ahead what is in files."""
        for piece in self.pieces.values():
            expect(piece)

    def show(self, data: npt.NDArray[Any]) -> None:
        """Takes the bytes of all of it where they are, without a copy."""
        self.pieces = {0: data.reshape(-1).view(np.uint8)}


def sections_needed(launches: Sequence[Launch]) -> list[tuple[int, WeightGroup]]:
    """The sections that launches read, each with the launch before which it may be brought.

    That is behind the last one that reads what was in its place.
    """
    needed: list[tuple[int, WeightGroup]] = []
    present: dict[tuple[WeightStream, int], WeightGroup] = {}
    free_from: dict[tuple[WeightStream, int], int] = {}
    for index, launch in enumerate(launches):
        for tensor in launch.tensors.values():
            section = None if tensor.storage is None else tensor.storage.section
            if section is None:
                continue
            key = section.stream, section.place
            if present.get(key) is not section:
                needed.append((free_from.get(key, 0), section))
                present[key] = section
            free_from[key] = index + 1
    return needed


def steady_state_uploads(launches: Sequence[Launch]) -> list[WeightGroup]:
    """The sections that a run of launches brings, if a run of the same went before."""
    needed = [section for _, section in sections_needed(launches)]
    last = {(section.stream, section.place): section for section in needed}
    brought = []
    for section in needed:
        if last[section.stream, section.place] is not section:
            brought.append(section)
        last[section.stream, section.place] = section
    return brought


@dataclass(eq=False)
class OffloadedTensor:
    """A tensor's bytes while it waits."""

    name: str  # the tensor's
    nbytes: int  # their number
    data: npt.NDArray[np.uint8] | None = None  # the bytes themselves
    lasts: bool = False  # whether they outlive the run: they are all there at its end


@dataclass
class StagingBuffers:
    """The buffers that a model's parked tensors pass through, whatever the shape of its steps."""

    outgoing: Storage | None = None  # what the host reads
    incoming: list[Storage] = field(default_factory=list)  # what it writes, in turns

    def download_buffer(self, nbytes: int) -> Storage:
        """The buffer through which a tensor goes to the host."""
        if self.outgoing is None or self.outgoing.nbytes < nbytes:
            self.outgoing = Storage("what goes to the host", "staging", nbytes)
        return self.outgoing

    def upload_buffer(self, nbytes: int, turn: int) -> Storage:
        """The buffer through which the tensor of a turn comes back."""
        if not self.incoming or self.incoming[0].nbytes < nbytes:
            self.incoming = [
                Storage("what comes from the host", "staging", nbytes) for _ in range(NUM_BUFFERS)
            ]
        return self.incoming[turn % NUM_BUFFERS]


@dataclass(frozen=True)
class CheckpointPolicy:
    """What is computed again in the backward, and how."""

    # How many layers at once, where they are recomputed; the first one's input is kept
    together: int = 1
    # How many layers, the last, are not, whose results are free before others are made
    kept: int = 0
    # What these inputs pass through to wait in host memory; None where they stay
    parking: StagingBuffers | None = None
    # Whether what a cheap launch makes from tensors that are kept anyway is made again
    remakes: bool = False
