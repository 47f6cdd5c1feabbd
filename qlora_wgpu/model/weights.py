"""Frozen weights on the device: which form each takes, its bytes, and its upload.

The same code lays out a model whose weights are still to be seen (for a plan) and one that is
loaded. Each tensor is read, quantized, uploaded and forgotten before the next, so host memory
stays near one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import Architecture, ExpertSpec, LinearSpec, Modules, stored_parts
from qlora_wgpu.gpu.device import ALIGNMENT, Device
from qlora_wgpu.graph.dtype import (
    pad_rows,
    padded,
    round_up,
    stored_floats,
)
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, row
from qlora_wgpu.kernels.dequantize import fits_words
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.model import quantized_weights
from qlora_wgpu.model.base_parts import start_of_files
from qlora_wgpu.model.host_matrices import fill, row_pieces, streamed_matrix
from qlora_wgpu.model.quantized_weights import device_arrays as _device_arrays
from qlora_wgpu.model.quantized_weights import quantized_matrix
from qlora_wgpu.model.residency import RESIDENT, Residency
from qlora_wgpu.model.storage_forms import StorageForms
from qlora_wgpu.model.weight_loading import Load, Progress
from qlora_wgpu.model.weight_names import stored_embedding, stored_name
from qlora_wgpu.model.weight_places import WeightPlaces
from qlora_wgpu.model.weight_source import WeightSource, bits_of
from qlora_wgpu.ops.logits import shard_rows
from qlora_wgpu.ops.modules import (
    DenseExperts,
    DenseMatrix,
    ExpertLinear,
    ExpertMatrix,
    HostMatrix,
    Linear,
    Matrix,
    StreamedMatrix,
)
from qlora_wgpu.ops.quantized import QuantizedMatrix
from qlora_wgpu.ops.trained_matrix import TrainedMatrix
from qlora_wgpu.ops.trained_rows import TrainedRows
from qlora_wgpu.quant import WeightFormat

__all__ = ["WeightLayout", "_device_arrays", "quantized_matrix", "stored_name"]

FloatArray = npt.NDArray[np.float32]
_NO_OFFSET = np.float32(0)
_COPIED = ("maps", "nested_absmax")  # what of a matrix is never a file's own bytes


class WeightLayout:
    """Builds a model's modules."""

    def __init__(
        self,
        quant: QuantConfig,
        dtype: str,
        max_binding: int,
        folder: ModelFolder | None = None,
        device: Device | None = None,
        *,
        weight_dtype: str = "",
        textures: bool = False,
        head_block: int = 1 << 30,
        config: Mapping[str, Any] | None = None,
        residency: Residency = RESIDENT,
        keep: bool = False,
    ) -> None:
        """Without a folder, shapes and bytes only; without a device, data is kept for one.

        Args:
            quant: How linear layers are stored.
            dtype: Element type of matmul operands.
            weight_dtype: Of frozen weights that products read; the operands' by default.
            max_binding: Largest number of bytes that one binding may show.
            folder: The weights.
            device: The device that gets them.
            textures: Whether matrices that are not quantized are kept in textures.
            head_block: Rows of a block of the head.
            config: The config.json, for plans without a folder.
            residency: What waits in host memory.
            keep: Whether layers that come and go, and are quantized here, are kept on disk.
        """
        self._forms = StorageForms(quant, folder, config)
        self._dtype = dtype
        self._weight_dtype = weight_dtype or dtype
        self._max_binding = max_binding
        self._textures = textures
        self._head_block = head_block
        self._residency = residency
        self._source = WeightSource(folder, quant)
        made_from = partial(self._source.made_from, self._weight_dtype) if keep else _nothing
        self.places = WeightPlaces(
            device, made_from, self._source.requantization,
            textures=textures, reads=folder is not None,
        )  # fmt: skip
        self._codebooks: dict[bytes, Tensor] = {}

    def modules(
        self,
        architecture: Architecture,
        adapter: Adapter,
        progress: Progress = lambda name: None,
    ) -> Modules:
        """Lays out every weight, and reads it at once if there is a folder.

        Args:
            architecture: The model's layers and norms.
            adapter: The adapter, whose pairs the layers get.
            progress: Called with each tensor's name before it is read.

        Raises:
            CheckpointError: If a tensor is missing, damaged or of another shape.
            OutOfMemoryError: If the device has no room.
        """
        modules = self.lay_out(architecture, adapter)
        self._load(progress)
        return modules

    def lay_out(self, architecture: Architecture, adapter: Adapter) -> Modules:
        """The modules without their bytes, which ``load`` brings; arguments as for ``modules``.

        Raises:
            CheckpointError: If the files lack a tensor or hold one that config.json denies.
        """
        self.places.is_deferred = True
        if adapter.config.changes_base:
            self._source.changed = frozenset(f"{spec.name}.weight" for spec in adapter.targets)
        vocab, hidden = architecture.vocab_size, architecture.hidden_size
        self._source.prefixes = architecture.stored_prefixes
        self.places.first_streamed = architecture.num_layers - self._residency.streamed_layers
        name, tied = stored_embedding(self._source.folder, architecture), architecture.tied
        head_name = name if tied else architecture.head_name
        if architecture.stored_rows is not None:
            self._source.stored_rows = dict.fromkeys((name, head_name), architecture.stored_rows)
        streamed = self._residency.streamed_head
        rows = adapter.trained_rows
        of_embedding = rows.get(architecture.embed_name.removesuffix(".weight"))
        of_head = rows.get(architecture.head_name.removesuffix(".weight"))
        of_head = of_embedding if tied else of_head
        wholes = adapter.trained_whole
        whole_embedding = wholes.get(architecture.embed_name.removesuffix(".weight"))
        whole_head = whole_embedding if tied else wholes.get(architecture.head.name)
        if whole_head is not None and streamed:
            raise ConfigError(
                f"lora.modules_to_save trains {head_name} whole, which cannot wait in host memory: "
                "leave it out, or raise device.memory"
            )
        head: Matrix
        if streamed:
            head = self._streamed_head(head_name, vocab, hidden, of_head)
        else:
            head = self._dense(head_name, vocab, hidden, trained=of_head, whole=whole_head)
        embedding: Matrix | HostMatrix
        if tied:
            embedding = head.host if isinstance(head, StreamedMatrix) else head
        elif self._residency.host_embedding and whole_embedding is None:
            embedding = self._on_host(name, vocab, hidden, trained=of_embedding)
        else:
            embedding = self._dense(name, vocab, hidden, self._dtype, of_embedding, whole_embedding)
        biases = {
            name: bias
            for specs in with_one_input(architecture.linears)
            for name, bias in self._biases([spec for spec in specs if spec.bias]).items()
        }
        linears = {
            spec.name: self._linear(spec, adapter, biases.get(spec.name))
            for spec in architecture.linears
        }
        norms = {
            n: self._float32(n, shape, np.float32(architecture.offset_of(n)))
            for n, shape in architecture.norm_shapes.items()
        }
        experts = {stack.name: self._experts(stack, adapter) for stack in architecture.experts}
        routers = {n: self._dense(n, *shape) for n, shape in architecture.routers.items()}
        tables = {n: self._on_host(n, *shape, n) for n, shape in architecture.tables.items()}
        head_lora = adapter.loras.get(architecture.head.name)
        return Modules(
            embedding, head, linears, norms, experts, routers, tables, head_lora,
            adapter.embedding_lora, architecture.padding_idx,
        )  # fmt: skip

    def begin(self, adapter: Adapter, seed: int, progress: Progress) -> str:
        """Takes the adapter's start from the weights, before they are loaded; what that took.

        A start that the adapter has already is taken as it is.

        Raises:
            CheckpointError: If a tensor is missing, damaged or of another shape.
            UnsupportedModelError: If the files hold one in few bits.
        """
        told = ""
        if adapter.start is None:
            adapter.start, told = start_of_files(adapter, self._source, seed, progress)
        self._source.subtract(adapter)
        return told

    def load(self, device: Device, progress: Progress = lambda name: None) -> None:
        """Reads and uploads everything that was laid out.

        Args:
            device: The device that gets it.
            progress: Called with each tensor's name before it is read.

        Raises:
            CheckpointError: If a tensor is missing, damaged or of another shape.
            OutOfMemoryError: If the device has no room.
        """
        self.places.device, self.places.is_deferred = device, False
        self._load(progress)

    def _load(self, progress: Progress) -> None:
        self.places.run(progress)
        self._source.requantization.warn()

    # -- bytes -------------------------------------------------------------------------------

    # -- vectors and dense matrices ------------------------------------------------------------

    def _linear(self, spec: LinearSpec, adapter: Adapter, bias: Tensor | None) -> Linear:
        name = f"{spec.name}.weight"
        shape = spec.out_features, spec.in_features
        form = self._forms.of([self._source.stored(name)], spec.in_features)
        weight: Matrix = (
            self._dense(name, *shape)
            if form is None
            else self._quantized_matrix(name, shape, form, [name])
        )
        if bias is None:
            self._source.refuse_bias(spec.name)
        return Linear(spec.name, weight, bias, adapter.loras.get(spec.name))

    def _float32(
        self, name: str, shape: tuple[int, ...], offset: np.float32 = _NO_OFFSET
    ) -> Tensor:
        """A norm: a row, or a matrix of one for each head; or a number. All in whole units."""
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        storage = Storage(name, "norms", 4 * rows * padded(columns))

        def load() -> None:
            parts = [self._source.read(*part) for part in stored_parts(name, shape)]
            array = np.stack(parts).reshape(rows, columns)
            self.places.fill(storage, pad_rows(array + offset))

        self.places.when_loading(name, load)
        if len(shape) > 1:
            return matrix(name, rows, columns, "float32", storage)
        return row(name, columns, "float32", storage)

    def _biases(self, specs: list[LinearSpec]) -> dict[str, Tensor]:
        """Biases of layers of one input, in one storage, each where a binding may begin."""
        begins = [0]
        for spec in specs:
            begins.append(begins[-1] + round_up(padded(spec.out_features), ALIGNMENT // 4))
        storage = Storage("biases", "norms", 4 * begins[-1])
        whole = np.zeros(begins[-1], np.float32)
        missing = {spec.name for spec in specs}

        def load(spec: LinearSpec, begin: int) -> None:
            bias = self._source.read(f"{spec.name}.bias", (spec.out_features,))
            whole[begin : begin + spec.out_features] = bias
            missing.discard(spec.name)
            if not missing:
                self.places.fill(storage, whole)

        for spec, begin in zip(specs, begins, strict=False):
            self.places.when_loading(f"{spec.name}.bias", partial(load, spec, begin))
        return {
            spec.name: row(f"{spec.name}.bias", spec.out_features, "float32", storage, 4 * begin)
            for spec, begin in zip(specs, begins, strict=False)
        }

    def _dense(
        self,
        name: str,
        rows: int,
        columns: int,
        dtype: str = "",
        trained: TrainedRows | None = None,
        whole: TrainedMatrix | None = None,
    ) -> DenseMatrix:
        dtype = dtype or self._weight_dtype
        row_bytes = matrix("", 1, columns, dtype).nbytes
        most = shard_rows(row_bytes, self._max_binding, self._head_block)
        pieces: list[tuple[int, Tensor]] = []
        for row0, count in row_pieces(rows, most):
            storage = self.places.dense_storage(name, count * row_bytes)
            pieces.append((row0, matrix(name, count, columns, dtype, storage)))
        image = self.places.dense_image_of(name)
        self.places.expect_load(self._source.loading_bytes(name, rows, columns, dtype))
        if image is not None:
            image.as_stored &= self._source.is_as_stored(name, columns, dtype)
        self.places.when_loading(
            name, lambda: self._load_dense(name, (rows, columns), pieces, trained), image
        )
        if whole is not None:
            whole.originals = lambda: self._source.read(name, (rows, columns))
        return DenseMatrix(rows, columns, tuple(pieces), trained, whole)

    def _on_host(
        self,
        name: str,
        rows: int,
        columns: int,
        kind: str = "embedding",
        trained: TrainedRows | None = None,
    ) -> HostMatrix:
        """A matrix whose rows the host looks up; a table of a file in bfloat16 stays so."""
        stays = kind != "embedding" and self._source.is_as_stored(name, columns, "bfloat16")
        dtype = "bfloat16" if stays else self._dtype
        matrix = self.places.waiting[kind] = HostMatrix(rows, columns, dtype, trained=trained)
        matrix.as_stored = self._source.is_as_stored(name, columns, dtype)
        if not matrix.as_stored:  # beside its own bytes, which wait
            taken = self._source.loading_bytes(name, rows, columns, dtype)
            self.places.expect_load(taken - matrix.nbytes)

        def load() -> None:
            matrix.values = self._source.read_bits(name, (rows, columns), dtype)
            _keep_originals(trained, matrix.values, columns, dtype)

        self.places.when_loading(name, load)
        return matrix

    def _streamed_head(
        self, name: str, rows: int, columns: int, trained: TrainedRows | None
    ) -> StreamedMatrix:
        """A head that comes in blocks."""
        host = HostMatrix(rows, columns, self._weight_dtype, trained=trained)
        self.places.waiting["lm_head"] = host
        stream = self.places.stream
        head = streamed_matrix(name, host, stream, self._max_binding, self._head_block)
        host.as_stored = self._source.is_as_stored(name, columns, host.dtype)
        if not host.as_stored:
            taken = self._source.loading_bytes(name, rows, columns, host.dtype)
            self.places.expect_load(taken - host.nbytes)

        def load() -> None:
            bits = self._source.read_bits(name, (rows, columns), host.dtype)
            _keep_originals(trained, bits, columns, host.dtype)
            fill(head, bits)

        self.places.when_loading(name, load)
        return head

    def _load_dense(
        self,
        name: str,
        shape: tuple[int, int],
        pieces: list[tuple[int, Tensor]],
        trained: TrainedRows | None = None,
    ) -> None:
        bits = self._source.read_bits(name, shape, pieces[0][1].dtype)
        _keep_originals(trained, bits, shape[1], pieces[0][1].dtype)
        for row0, piece in pieces:
            assert piece.storage is not None
            self.places.fill(piece.storage, bits[row0 : row0 + piece.rows])

    # -- experts -------------------------------------------------------------------------------

    def _experts(self, stack: ExpertSpec, adapter: Adapter) -> ExpertLinear:
        names = [f"{spec.name}.weight" for spec in stack.linears]
        shape = stack.out_features, stack.in_features
        form = self._forms.of([self._source.stored(name) for name in names], stack.in_features)
        weight: ExpertMatrix = (
            self._dense_experts(stack.name, *shape, names)
            if form is None
            else self._quantized_matrix(f"{stack.name}.weight", shape, form, names)
        )
        bias = None
        if stack.bias:
            every = f"{stack.at}.*.{stack.leaf}.bias"
            bias = self._float32(every, (stack.experts, stack.out_features))
        return ExpertLinear(stack.name, weight, adapter.expert_loras.get(stack.name), bias)

    def _dense_experts(self, name: str, rows: int, columns: int, names: list[str]) -> DenseExperts:
        dtype = self._weight_dtype
        one = matrix("", rows, columns, dtype).nbytes
        most = max(self._max_binding // one, 1)
        pieces = []
        for first in range(0, len(names), most):
            group = names[first : first + most]
            storage = self.places.dense_storage(name, len(group) * one)
            self.places.expect_load(3 * len(group) * 4 * rows * columns)
            image = self.places.dense_image_of(name)
            if image is not None:
                image.as_stored = False
            self.places.when_loading(name, self._group_load(storage, group, (rows, columns)), image)
            whole = matrix(name, len(group) * rows, columns, dtype, storage)
            pieces.append((first, len(group), whole))
        return DenseExperts(len(names), rows, columns, tuple(pieces))

    def _group_load(self, storage: Storage, names: list[str], shape: tuple[int, int]) -> Load:
        def load() -> None:
            arrays = [self._source.read(each, shape) for each in names]
            self.places.fill(storage, bits_of(names[0], np.concatenate(arrays), self._weight_dtype))

        return load

    # -- quantized matrices --------------------------------------------------------------------

    def _quantized_matrix(
        self, name: str, shape: tuple[int, int], form: WeightFormat, parts: list[str]
    ) -> QuantizedMatrix:
        """One matrix, or the matrices of all ``parts`` one below the other."""
        in_words = self._textures and fits_words(form, shape[1])
        matrix, storages = quantized_weights.lay_out(
            name,
            shape,
            form,
            len(parts),
            partial(self.places.storage, name, most=self._max_binding),
            self._codebook(form) if in_words else None,
        )
        self._expect_quantized(name, shape, parts, storages)
        image = self.places.image_of(name)
        self.places.when_loading(
            name, lambda: self._load_quantized(name, parts, shape, storages), image
        )
        return matrix

    def _expect_quantized(
        self, name: str, shape: tuple[int, int], parts: list[str], storages: dict[str, Storage]
    ) -> None:
        """Counts what a matrix takes of the host, and whether its layer is as its files have it."""
        folder, image = self._source.folder, self.places.image_of(name)
        stored = [self._source.stored(part) for part in parts]
        mapped = folder is not None and len(parts) == 1 and folder.is_mapped(stored[0])
        if not mapped:
            quantized = sum(storage.nbytes for storage in storages.values())
            self.places.expect_load(4 * shape[0] * shape[1] + min(len(parts), 2) * quantized)
        if image is not None:
            image.as_stored &= mapped
            image.copied += sum(storages[leaf].nbytes for leaf in storages if leaf in _COPIED)

    def _load_quantized(
        self, name: str, parts: list[str], shape: tuple[int, int], storages: dict[str, Storage]
    ) -> None:
        assert self._source.folder is not None
        quantized = [self._source.quantized(part, shape) for part in parts]
        arrays = quantized_weights.stacked_arrays(quantized, name, self._source.folder.path)
        for leaf, storage in storages.items():
            self.places.fill(storage, arrays[leaf])

    def _codebook(self, form: WeightFormat) -> Tensor:
        """The values of pairs of codes, shared by all matrices with the same map."""
        key = form.quant_map.tobytes()
        if key not in self._codebooks:
            self._codebooks[key] = quantized_weights.codebook_tensor(form, Storage)
        return self._codebooks[key]


def _keep_originals(
    trained: TrainedRows | None, bits: npt.NDArray[Any], columns: int, dtype: str
) -> None:
    """Keeps what a matrix has in place of its trained rows: where these begin."""
    if trained is not None:
        own = np.ascontiguousarray(bits[list(trained.indices)])
        floats = stored_floats(own.data.cast("B"), dtype).reshape(len(own), -1)
        trained.originals = floats[:, :columns].astype(np.float32)


def _nothing() -> None:
    """Says that nothing is kept."""


def with_one_input(specs: Iterable[LinearSpec]) -> Iterator[list[LinearSpec]]:
    """Neighbours of one module and as many inputs, as q, k and v are."""
    for _, some in groupby(specs, lambda s: (s.name.rpartition(".")[0], s.in_features)):
        yield list(some)
