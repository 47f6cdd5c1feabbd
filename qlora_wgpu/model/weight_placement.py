"""Where weights are: on the device, coming and going with their layer, or in host memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.offload import Stream
from qlora_wgpu.graph.program import allocate
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix
from qlora_wgpu.model.checkpoint_reader import Requantization, WeightSource, keep_originals
from qlora_wgpu.model.weight_loader import LayerImage, Load, Progress, WeightLoading
from qlora_wgpu.ops.logits import block_rows
from qlora_wgpu.ops.modules import HostMatrix, StreamedMatrix
from qlora_wgpu.ops.trained import TrainedRows


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


def row_pieces(rows: int, most: int) -> Iterator[tuple[int, int]]:
    """``(first row, count)`` of pieces of so many rows, and of what is left."""
    for row0 in range(0, rows, most):
        yield row0, min(most, rows - row0)


def streamed_matrix(
    name: str, host: HostMatrix, stream: Stream, max_binding: int, block: int
) -> StreamedMatrix:
    """A matrix whose blocks are sections of a stream.

    Args:
        name: For messages.
        host: The matrix, not read yet.
        stream: What it comes with; its last section should not be in use with the first block.
        max_binding: Largest number of bytes that one binding may show.
        block: Most rows of a block.
    """
    row_bytes = matrix("", 1, host.columns, host.dtype).nbytes
    blocks: list[tuple[int, Tensor]] = []
    for row0, count in row_pieces(host.rows, block_rows(row_bytes, max_binding, block)):
        section = stream.new_section(f"{name} from row {row0}")
        storage = section.storage(name, count * row_bytes)
        blocks.append((row0, matrix(name, count, host.columns, host.dtype, storage)))
    return StreamedMatrix(host.rows, host.columns, tuple(blocks), host)


def fill(streamed: StreamedMatrix, values: npt.NDArray[Any]) -> None:
    """Gives a streamed matrix its rows, of which its sections keep windows.

    Args:
        streamed: The matrix.
        values: (rows, padded columns) as stored.
    """
    streamed.host.values = values
    for row0, block in streamed.blocks:
        assert block.storage is not None and block.storage.section is not None
        block.storage.section.show(values[row0 : row0 + block.rows])


@dataclass(frozen=True)
class HostWeights:
    """Lays out matrices that the device never has as a whole.

    Attributes:
        source: The files.
        places: Where weights are kept.
    """

    source: WeightSource
    places: WeightPlaces

    def embedding(
        self, name: str, rows: int, columns: int, dtype: str, trained: TrainedRows | None
    ) -> HostMatrix:
        """The input embedding in a type, perhaps with trained rows."""
        return self._looked_up("embedding", name, rows, columns, dtype, trained)

    def table(self, name: str, rows: int, columns: int, dtype: str) -> HostMatrix:
        """A further table in a type; one that its file has in bfloat16 stays so."""
        stays = self.source.is_as_stored(name, columns, "bfloat16")
        return self._looked_up(name, name, rows, columns, "bfloat16" if stays else dtype, None)

    def _looked_up(
        self,
        kind: str,
        name: str,
        rows: int,
        columns: int,
        dtype: str,
        trained: TrainedRows | None,
    ) -> HostMatrix:
        matrix = self.places.waiting[kind] = HostMatrix(rows, columns, dtype, trained=trained)
        self._expect(name, matrix)

        def load() -> None:
            matrix.values = self.source.read_bits(name, (rows, columns), dtype)
            keep_originals(trained, matrix.values, columns, dtype)

        self.places.when_loading(name, load)
        return matrix

    def streamed_head(
        self, name: str, host: HostMatrix, max_binding: int, block: int
    ) -> StreamedMatrix:
        """A head whose blocks come and go.

        Args:
            name: The weight's.
            host: The matrix, not read yet.
            max_binding: Largest number of bytes that one binding may show.
            block: Most rows of a block.
        """
        self.places.waiting["lm_head"] = host
        head = streamed_matrix(name, host, self.places.stream, max_binding, block)
        self._expect(name, host)

        def load() -> None:
            bits = self.source.read_bits(name, (host.rows, host.columns), host.dtype)
            keep_originals(host.trained, bits, host.columns, host.dtype)
            fill(head, bits)

        self.places.when_loading(name, load)
        return head

    def _expect(self, name: str, matrix: HostMatrix) -> None:
        """Counts what reading takes beside the matrix's own bytes, which wait."""
        matrix.as_stored = self.source.is_as_stored(name, matrix.columns, matrix.dtype)
        if not matrix.as_stored:
            taken = self.source.loading_bytes(name, matrix.rows, matrix.columns, matrix.dtype)
            self.places.expect_load(taken - matrix.nbytes)
