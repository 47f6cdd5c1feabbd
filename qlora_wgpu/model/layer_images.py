"""Each layer's weights as one run of bytes: what passes to the device, and what a file keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.gpu.sizes import buffer_bytes
from qlora_wgpu.graph.section import Section, Stream
from qlora_wgpu.graph.tensor import WINDOW, Storage

Fill = Callable[[Storage, npt.NDArray[Any]], None]


@dataclass(eq=False)
class LayerImage:
    """A layer's storages, one behind the other.

    Attributes:
        number: The layer's.
        section: What they come and go with; None where they stay on the device.
        parts: The storages with the byte at which each begins.
        together: What those lie in that stay on the device and may be bound at once.
        nbytes: Bytes of all, gaps included.
        copied: Bytes of what is in host memory where the rest is the model's own files'.
        as_stored: Whether the model's files hold nearly all of it as the device takes it.
    """

    number: int
    section: Section | None
    parts: list[tuple[int, Storage]] = field(default_factory=list)
    together: Storage | None = None
    nbytes: int = 0
    copied: int = 0
    as_stored: bool = True

    def storage(self, label: str, nbytes: int, most: int = 0) -> Storage:
        """A storage at its end.

        Args:
            label: For messages.
            nbytes: Its size.
            most: Bytes of a larger storage that it is to lie in together with its neighbours.
        """
        begin = self.nbytes
        if self.section is not None:
            storage = self.section.storage(label, nbytes)
        elif nbytes > most:
            storage = Storage(label, "base", nbytes)
        else:
            storage = self._together(nbytes, most).part(label, nbytes)
        self.parts.append((begin, storage))
        self.nbytes += -(-nbytes // WINDOW) * WINDOW
        return storage

    def _together(self, nbytes: int, most: int) -> Storage:
        """A storage with room for so many bytes more."""
        if self.together is None or self.together.nbytes + nbytes > most:
            self.together = Storage(f"layer {self.number}", "base", 0)
        return self.together

    @cached_property
    def begins(self) -> dict[Storage, int]:
        """Where each storage begins, once all are there."""
        return {storage: begin for begin, storage in self.parts}

    @property
    def table(self) -> list[tuple[int, str, int]]:
        """Where what begins, and how long it is."""
        return [(begin, storage.label, storage.nbytes) for begin, storage in self.parts]

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of what stays there."""
        if self.section is not None:
            return 0
        wholes = dict.fromkeys(storage.whole for _, storage in self.parts)
        return sum(buffer_bytes(whole.nbytes) for whole in wholes)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it takes without a file of its own."""
        if self.section is None:
            return 0
        return self.copied if self.as_stored else self.nbytes

    def fill(self, image: npt.NDArray[np.uint8], fill: Fill) -> None:
        """Takes its bytes from an image.

        Args:
            image: All of them; mapped, or in memory.
            fill: Gives a storage that stays on the device its bytes.
        """
        if self.section is not None:
            self.section.pieces = {0: image}
            return
        for begin, storage in self.parts:
            fill(storage, image[begin : begin + storage.nbytes])


class LayerImages:
    """Those of a model."""

    def __init__(self) -> None:
        """Holds none yet."""
        self.stream = Stream()
        self.layers: dict[int, LayerImage] = {}

    def of(self, number: int, *, streamed: bool) -> LayerImage:
        """A layer's.

        Args:
            number: The layer's.
            streamed: Whether it comes and goes, if it is new.
        """
        if number not in self.layers:
            section = self.stream.new_section(f"layer {number}") if streamed else None
            self.layers[number] = LayerImage(number, section)
        return self.layers[number]

    @property
    def sections(self) -> list[Section]:
        """Those of the layers that come and go."""
        sections = (image.section for image in self.layers.values())
        return [section for section in sections if section is not None]

    @property
    def kept(self) -> list[LayerImage]:
        """Those of which files are made, since the model's own have them otherwise."""
        return [i for i in self.layers.values() if not i.as_stored]

    def host_bytes(self, *, kept: bool) -> int:
        """Bytes of host memory that those take which come and go.

        Args:
            kept: Whether files are made of those that are unlike the model's.
        """
        images = (i for i in self.layers.values() if i.as_stored or not kept)
        return sum(image.host_bytes for image in images)
