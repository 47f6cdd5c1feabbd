"""Frozen weights on the device: which form each takes, its bytes, and its upload.

The same code lays out a model whose weights are still to be seen (for a plan) and one that is
loaded. Each tensor is read, quantized, uploaded and forgotten before the next, so host memory
stays near one tensor.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.families.family import Architecture, ExpertSpec, LinearSpec, Modules, stored_parts
from qlora_wgpu.gpu.device import ALIGNMENT, Device
from qlora_wgpu.graph.dtype import (
    LARGEST_FLOAT16,
    pad_rows,
    padded,
    round_up,
    stored_bits,
)
from qlora_wgpu.graph.program import allocate
from qlora_wgpu.graph.section import Section, Stream
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, vector
from qlora_wgpu.kernels.dequantize import fits_words
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.model import quantized_weights
from qlora_wgpu.model.host_matrices import fill, row_pieces, streamed_matrix
from qlora_wgpu.model.quantized_weights import device_arrays as _device_arrays
from qlora_wgpu.model.quantized_weights import quantized_matrix
from qlora_wgpu.model.requantization import Requantization
from qlora_wgpu.model.residency import RESIDENT, Residency
from qlora_wgpu.model.storage_forms import StorageForms
from qlora_wgpu.model.weight_names import stored_embedding, stored_name, with_prefixes
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
from qlora_wgpu.quant import QuantizedWeight, WeightFormat, quantize_nf4

__all__ = ["WeightLayout", "_device_arrays", "quantized_matrix", "stored_name"]

FloatArray = npt.NDArray[np.float32]
Progress = Callable[[str], None]
_Load = Callable[[], None]
_NO_OFFSET = np.float32(0)


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
            head_block: Rows of a block of the head, where it is streamed.
            config: The config.json, for plans without a folder.
            residency: What waits in host memory.
        """
        self._forms = StorageForms(quant, folder, config)
        self._quant = quant
        self._dtype = dtype
        self._weight_dtype = weight_dtype or dtype
        self._max_binding = max_binding
        self._folder = folder
        self._device = device
        self._textures = textures
        self._head_block = head_block
        self._residency = residency
        self._sections: dict[int, Section] = {}
        self._host_rows: HostMatrix | None = None
        self._stream, self._first_streamed = Stream(), 0
        self._codebooks: dict[bytes, Tensor] = {}
        self._prefixes: tuple[tuple[str, str], ...] = ()
        self._deferred: list[tuple[str, _Load]] | None = None
        self._requantization = Requantization()

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
        self._deferred = []
        vocab, hidden = architecture.vocab_size, architecture.hidden_size
        self._prefixes = architecture.stored_prefixes
        self._first_streamed = architecture.num_layers - self._residency.streamed_layers
        name, tied = stored_embedding(self._folder, architecture), architecture.tied
        head_name = name if tied else architecture.head_name
        streamed = self._residency.streamed_head
        head: Matrix
        if streamed:
            head = self._streamed_head(head_name, vocab, hidden)
        else:
            head = self._dense(head_name, vocab, hidden)
        embedding: Matrix | HostMatrix
        if tied:
            embedding = head.host if isinstance(head, StreamedMatrix) else head
        elif self._residency.host_embedding:
            embedding = self._on_host(name, vocab, hidden)
        else:
            embedding = self._dense(name, vocab, hidden, self._dtype)
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
        return Modules(embedding, head, linears, norms, experts, routers)

    def load(self, device: Device, progress: Progress = lambda name: None) -> None:
        """Reads and uploads everything that was laid out.

        Args:
            device: The device that gets it.
            progress: Called with each tensor's name before it is read.

        Raises:
            CheckpointError: If a tensor is missing, damaged or of another shape.
            OutOfMemoryError: If the device has no room.
        """
        self._device = device
        self._load(progress)

    @property
    def num_tensors(self) -> int:
        """Number of names that ``progress`` will be called with."""
        return len(self._deferred or ())

    def _load(self, progress: Progress) -> None:
        loads, self._deferred = self._deferred or [], None
        for name, load in loads:
            progress(name)
            load()
        self._requantization.warn()

    # -- bytes -------------------------------------------------------------------------------

    def _when_loading(self, name: str, load: _Load) -> None:
        """Does it now, or where a layout comes first, later."""
        if self._folder is None:
            return
        if self._deferred is None:
            load()
        else:
            self._deferred.append((name, load))

    def _fill(self, storage: Storage, data: npt.NDArray[Any] | None) -> None:
        """Gives a storage its bytes, on the device if there is one."""
        if storage.section is not None and data is not None:
            storage.section.put(storage, data)
            return
        storage.data = data
        if self._device is not None:
            allocate(self._device, storage)
            storage.data = None

    def _stored(self, name: str) -> str:
        """The name of a tensor in the files."""
        return name if self._folder is None else with_prefixes(self._folder, self._prefixes, name)

    def _has(self, name: str) -> bool:
        return self._folder is not None and self._folder.has(self._stored(name))

    def _read(self, name: str, shape: tuple[int, ...]) -> FloatArray:
        assert self._folder is not None
        name = self._stored(name)
        array = self._folder.dequantized(name) if len(shape) == 2 else self._folder.float32(name)
        _check_shape(self._folder, name, array.shape, shape)
        return array

    def _bits(self, name: str, array: FloatArray, dtype: str) -> npt.NDArray[Any]:
        """A matrix in a type, its rows padded."""
        if dtype == "float16" and (np.isfinite(array) & (np.abs(array) > LARGEST_FLOAT16)).any():
            raise CheckpointError(
                f"{name} holds weights that are larger than matrix units take "
                f"({LARGEST_FLOAT16:,.0f} in float16): use "
                "train.compute_dtype: float32 or device.backend: wgpu"
            )
        return stored_bits(pad_rows(array), dtype)

    # -- vectors and dense matrices ------------------------------------------------------------

    def _linear(self, spec: LinearSpec, adapter: Adapter, bias: Tensor | None) -> Linear:
        name = f"{spec.name}.weight"
        shape = spec.out_features, spec.in_features
        form = self._forms.of([self._stored(name)], spec.in_features)
        weight: Matrix = (
            self._dense(name, *shape)
            if form is None
            else self._quantized_matrix(name, shape, form, [name])
        )
        if bias is None and self._folder is not None and self._has(f"{spec.name}.bias"):
            raise CheckpointError(
                f"{self._folder.path}: the weights hold {spec.name}.bias, but config.json says "
                "that this layer has no bias"
            )
        return Linear(spec.name, weight, bias, adapter.loras.get(spec.name))

    def _float32(
        self, name: str, shape: tuple[int, ...], offset: np.float32 = _NO_OFFSET
    ) -> Tensor:
        """A norm: a vector, or a matrix of one row for each head; or a number."""
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        storage = Storage(name, "norms", 4 * rows * padded(columns))

        def load() -> None:
            parts = [self._read(*part) for part in stored_parts(name, shape)]
            array = np.stack(parts).reshape(rows, columns)
            self._fill(storage, pad_rows(array + offset))

        self._when_loading(name, load)
        if len(shape) > 1:
            return matrix(name, rows, columns, "float32", storage)
        return vector(name, columns, "float32", storage)

    def _biases(self, specs: list[LinearSpec]) -> dict[str, Tensor]:
        """Biases of layers of one input, in one storage, each where a binding may begin."""
        begins = [0]
        for spec in specs:
            begins.append(begins[-1] + round_up(padded(spec.out_features), ALIGNMENT // 4))
        storage = Storage("biases", "norms", 4 * begins[-1])
        whole = np.zeros(begins[-1], np.float32)
        missing = {spec.name for spec in specs}

        def load(spec: LinearSpec, begin: int) -> None:
            bias = self._read(f"{spec.name}.bias", (spec.out_features,))
            whole[begin : begin + spec.out_features] = bias
            missing.discard(spec.name)
            if not missing:
                self._fill(storage, whole)

        for spec, begin in zip(specs, begins, strict=False):
            self._when_loading(f"{spec.name}.bias", partial(load, spec, begin))
        return {
            spec.name: vector(f"{spec.name}.bias", spec.out_features, "float32", storage, 4 * begin)
            for spec, begin in zip(specs, begins, strict=False)
        }

    def _dense(self, name: str, rows: int, columns: int, dtype: str = "") -> DenseMatrix:
        dtype = dtype or self._weight_dtype
        row_bytes = matrix("", 1, columns, dtype).nbytes
        pieces: list[tuple[int, Tensor]] = []
        for row0, count in row_pieces(rows, row_bytes, self._max_binding):
            storage = self._dense_storage(name, count * row_bytes)
            pieces.append((row0, matrix(name, count, columns, dtype, storage)))
        self._when_loading(name, lambda: self._load_dense(name, (rows, columns), pieces))
        return DenseMatrix(rows, columns, tuple(pieces))

    def _on_host(self, name: str, rows: int, columns: int) -> HostMatrix:
        """A matrix whose rows the host looks up."""
        matrix = self._host_rows = HostMatrix(rows, columns, self._dtype)

        def load() -> None:
            matrix.values = self._all_bits(name, matrix)

        self._when_loading(name, load)
        return matrix

    def _streamed_head(self, name: str, rows: int, columns: int) -> StreamedMatrix:
        """A head that comes in blocks."""
        host = HostMatrix(rows, columns, self._weight_dtype)
        head = streamed_matrix(name, host, self._stream, self._max_binding, self._head_block)
        self._when_loading(name, lambda: fill(head, self._all_bits(name, host)))
        return head

    def _all_bits(self, name: str, matrix: HostMatrix) -> npt.NDArray[Any]:
        return self._bits(name, self._read(name, (matrix.rows, matrix.columns)), matrix.dtype)

    def _storage(self, module: str, label: str, nbytes: int) -> Storage:
        """Memory for a part of a module, which may come and go with its layer of the model."""
        number = layer_number(module)
        if number is None or number < self._first_streamed:
            return Storage(label, "base", nbytes)
        if number not in self._sections:
            self._sections[number] = self._stream.new_section(f"layer {number}")
        return self._sections[number].storage(label, nbytes)

    def _dense_storage(self, name: str, nbytes: int) -> Storage:
        if self._textures:  # which are no windows of a buffer
            return Storage(name, "base", nbytes, texture=True)
        return self._storage(name, name, nbytes)

    @property
    def section_bytes(self) -> list[int]:
        """Bytes of each layer's part that comes and goes."""
        return [section.nbytes for section in self._sections.values()]

    @property
    def head_block_bytes(self) -> list[int]:
        """Bytes of each block of a streamed head."""
        layers = list(self._sections.values())
        return [each.nbytes for each in self._stream.sections if each not in layers]

    def host_bytes(self) -> Counter[str]:
        """Bytes by kind of the weights that stay in host memory."""
        rows = 0 if self._host_rows is None else self._host_rows.nbytes
        return Counter({"embedding": rows, "streamed weights": self._stream.host_bytes})

    def _load_dense(
        self, name: str, shape: tuple[int, int], pieces: list[tuple[int, Tensor]]
    ) -> None:
        array = self._read(name, shape)
        for row0, piece in pieces:
            assert piece.storage is not None
            part = array[row0 : row0 + piece.rows]
            self._fill(piece.storage, self._bits(name, part, piece.dtype))

    # -- experts -------------------------------------------------------------------------------

    def _experts(self, stack: ExpertSpec, adapter: Adapter) -> ExpertLinear:
        names = [f"{spec.name}.weight" for spec in stack.linears]
        shape = stack.out_features, stack.in_features
        form = self._forms.of([self._stored(name) for name in names], stack.in_features)
        weight: ExpertMatrix = (
            self._dense_experts(stack.name, *shape, names)
            if form is None
            else self._quantized_matrix(f"{stack.name}.weight", shape, form, names)
        )
        return ExpertLinear(stack.name, weight, adapter.expert_loras.get(stack.name))

    def _dense_experts(self, name: str, rows: int, columns: int, names: list[str]) -> DenseExperts:
        dtype = self._weight_dtype
        one = matrix("", rows, columns, dtype).nbytes
        most = max(self._max_binding // one, 1)
        pieces = []
        for first in range(0, len(names), most):
            group = names[first : first + most]
            storage = self._dense_storage(name, len(group) * one)
            self._when_loading(name, self._group_load(storage, group, (rows, columns)))
            whole = matrix(name, len(group) * rows, columns, dtype, storage)
            pieces.append((first, len(group), whole))
        return DenseExperts(len(names), rows, columns, tuple(pieces))

    def _group_load(self, storage: Storage, names: list[str], shape: tuple[int, int]) -> _Load:
        def load() -> None:
            arrays = [self._read(each, shape) for each in names]
            self._fill(storage, self._bits(names[0], np.concatenate(arrays), self._weight_dtype))

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
            partial(self._storage, name),
            self._codebook(form) if in_words else None,
        )
        self._when_loading(name, lambda: self._load_quantized(name, parts, shape, storages))
        return matrix

    def _load_quantized(
        self, name: str, parts: list[str], shape: tuple[int, int], storages: dict[str, Storage]
    ) -> None:
        assert self._folder is not None
        quantized = [self._quantized(part, shape) for part in parts]
        arrays = quantized_weights.stacked_arrays(quantized, name, self._folder.path)
        for leaf, storage in storages.items():
            self._fill(storage, arrays[leaf])

    def _quantized(self, name: str, shape: tuple[int, int]) -> QuantizedWeight:
        assert self._folder is not None
        name = self._stored(name)
        stored = self._folder.quantized(name)
        if stored is not None:
            _check_shape(self._folder, name, stored.shape, shape)
            return stored
        weight = self._read(name, shape)
        if self._folder.must_requantize(name):
            return self._requantization.quantize(weight, self._quant)
        return quantize_nf4(weight, self._quant.blocksize, self._quant.double_quant)

    def _codebook(self, form: WeightFormat) -> Tensor:
        """The values of pairs of codes, shared by all matrices with the same map."""
        key = form.quant_map.tobytes()
        if key not in self._codebooks:
            self._codebooks[key] = quantized_weights.codebook_tensor(form, Storage)
        return self._codebooks[key]


def with_one_input(specs: Iterable[LinearSpec]) -> Iterator[list[LinearSpec]]:
    """Neighbours of one module and as many inputs, as q, k and v are."""
    for _, some in groupby(specs, lambda s: (s.name.rpartition(".")[0], s.in_features)):
        yield list(some)


def layer_number(module: str) -> int | None:
    """The number of the layer that a module belongs to, by its name; None outside of layers."""
    found = re.search(r"\.(\d+)\.", module)
    return None if found is None else int(found[1])


def _check_shape(
    folder: ModelFolder, name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    if tuple(shape) != expected:
        raise CheckpointError(
            f"{folder.path}: {name} has shape {tuple(shape)}, but config.json asks for {expected}"
        )
