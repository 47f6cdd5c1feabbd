"""Where weights are: on the device, coming and going with their layer, or in host memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.program import allocate
from qlora_wgpu.graph.section import Stream
from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.model.layer_images import LayerImage
from qlora_wgpu.model.requantization import Requantization
from qlora_wgpu.model.weight_loading import Load, Progress, WeightLoading
from qlora_wgpu.ops.modules import HostMatrix


class WeightPlaces:
    """Memory for weights, and the order in which it is filled.

    Attributes:
        device: The device that gets them; None where bytes are kept for one.
        first_streamed: Number of the first layer that comes and goes.
        waiting: Matrices in host memory, by kind.
        is_deferred: Whether weights are read later, in ``run``.
    """

    def __init__(
        self, device: Device | None, made_from: Callable[[], Any],
        requantization: Requantization, *, textures: bool, reads: bool,
    ) -> None:  # fmt: skip
        """Has nothing yet.

        Args:
            device: The device that gets the weights; None where bytes are kept for one.
            made_from: Tells what decides the layers' bytes, for a cache; None where there is none.
            requantization: Counts the weights that are quantized anew.
            textures: Whether matrices that are not quantized are kept in textures.
            reads: Whether there are weights to be read.
        """
        self.device = device
        self.first_streamed = 0
        self.waiting: dict[str, HostMatrix] = {}
        self.is_deferred = False
        self._loading = WeightLoading(made_from, requantization)
        self._textures, self._reads = textures, reads
        self._largest_load = 0

    @property
    def stream(self) -> Stream:
        """What sections of weights come with."""
        return self._loading.images.stream

    @property
    def num_tensors(self) -> int:
        """Number of names that ``progress`` will be called with."""
        return len(self._loading)

    def when_loading(self, name: str, load: Load, image: LayerImage | None = None) -> None:
        """Does it now, or where a layout comes first, later."""
        if not self._reads:
            return
        if self.is_deferred:
            self._loading.add(name, load, image)
        else:
            load()

    def run(self, progress: Progress) -> None:
        """Reads all that was deferred; ``progress`` gets each tensor's name before."""
        self._loading.run(self.fill, progress)

    def fill(self, storage: Storage, data: npt.NDArray[Any] | None) -> None:
        """Gives a storage its bytes, on the device if there is one."""
        if data is not None and self._loading.put(storage, data):
            return
        storage.data = data
        if self.device is not None:
            allocate(self.device, storage)
            storage.data = None

    def image_of(self, module: str) -> LayerImage | None:
        """The layer that a module belongs to; None outside of layers."""
        number = layer_number(module)
        if number is None:
            return None
        return self._loading.images.of(number, streamed=number >= self.first_streamed)

    def storage(self, module: str, label: str, nbytes: int, most: int = 0) -> Storage:
        """Memory for a part of a module, which may come and go with its layer of the model.

        Args:
            module: Whose it is.
            label: For messages.
            nbytes: Its size.
            most: Bytes that it and its neighbours in the layer may take to lie together.
        """
        image = self.image_of(module)
        if image is None:
            return Storage(label, "base", nbytes)
        return image.storage(label, nbytes, most)

    def dense_storage(self, name: str, nbytes: int) -> Storage:
        """Memory for a matrix that is not quantized."""
        if self._textures:  # which are no windows of a buffer
            return Storage(name, "base", nbytes, texture=True)
        return self.storage(name, name, nbytes)

    def dense_image_of(self, name: str) -> LayerImage | None:
        """The layer that a matrix which is not quantized comes with."""
        return None if self._textures else self.image_of(name)

    def expect_load(self, nbytes: int) -> None:
        """Counts what reading one thing takes for a moment."""
        self._largest_load = max(self._largest_load, nbytes)

    # -- what they take ------------------------------------------------------------------------

    @property
    def section_bytes(self) -> list[int]:
        """Bytes of each layer's part that comes and goes."""
        return [section.nbytes for section in self._loading.images.sections]

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes on the device of what of each layer could come and go, and stays."""
        return [image.device_bytes for image in self._loading.images.layers.values()]

    @property
    def head_block_bytes(self) -> list[int]:
        """Bytes of each block of a streamed head."""
        layers = self._loading.images.sections
        return [each.nbytes for each in self.stream.sections if each not in layers]

    @property
    def problem(self) -> str:
        """Why layers are not kept on disk, where they should be; else empty."""
        return self._loading.problem

    @property
    def transfer_bytes(self) -> int:
        """Bytes of host memory that layers pass through on their way."""
        return self.stream.device_bytes

    @property
    def loading_bytes(self) -> int:
        """Bytes of host memory that are taken for a moment while weights are read."""
        return self._largest_load + (self._loading.largest_kept if self._loading.is_kept else 0)

    def host_bytes(self) -> Counter[str]:
        """Bytes by kind of the weights that stay in host memory."""
        waiting = self.waiting.items()
        memory = Counter({kind: each.nbytes for kind, each in waiting if not each.as_stored})
        memory["streamed weights"] = self._loading.host_bytes()
        return memory

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the weights that are read from files whenever they are needed."""
        mapped = sum(each.nbytes for each in self.waiting.values() if each.as_stored)
        return mapped + self._loading.mapped_bytes()


def layer_number(module: str) -> int | None:
    """The number of the layer that a module belongs to, by its name; None outside of layers."""
    found = re.search(r"\.(\d+)\.", module)
    return None if found is None else int(found[1])
