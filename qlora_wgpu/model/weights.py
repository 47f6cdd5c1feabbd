"""A base's weights as one table: each one's form, memory and how it is read.

Planned and loaded models use the same table; loading, memory and the state dict are loops over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import groupby, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import (
    Architecture,
    ExpertSpec,
    LinearSpec,
    Modules,
    stored_parts,
)
from qlora_wgpu.gpu.limits import ALIGNMENT
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, pad_rows, padded, round_up, row
from qlora_wgpu.kernels.dequantize import fits_words
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.adapter_init import start_of_files
from qlora_wgpu.model.checkpoint_reader import (
    CheckpointReader,
    bits_of,
    keep_originals,
    stored_embedding,
)
from qlora_wgpu.model.derived_weights import DequantizedWeights
from qlora_wgpu.model.offload_plan import RESIDENT, OffloadPlan
from qlora_wgpu.model.pretrained import QuantizationPolicy
from qlora_wgpu.model.quantized_weights import codebook_tensor, lay_out, stacked_arrays
from qlora_wgpu.model.weight_placement import (
    Filled,
    Progress,
    Weight,
    WeightPlacement,
    fill,
    row_pieces,
    streamed_matrix,
)
from qlora_wgpu.ops.logits import shard_rows
from qlora_wgpu.ops.modules import (
    DenseExperts,
    DenseMatrix,
    ExpertLinear,
    ExpertMatrix,
    HostEmbedding,
    Linear,
    Matrix,
    ScoreHead,
    StreamedMatrix,
)
from qlora_wgpu.ops.quantized import QuantizedMatrix
from qlora_wgpu.ops.trained import SavedModule, TrainableTokens
from qlora_wgpu.quant import WeightFormat

Shape = tuple[int, int]
_COPIED = (
    "maps",
    "nested_absmax",
)  # the parts of a quantized matrix that are never mapped from files


@dataclass(eq=False)
class WeightLayout:
    """Builds the table and a model's modules; without a folder, only shapes and sizes."""

    quant: QuantConfig
    dtype: str  # of matmul operands
    max_binding: int  # the largest binding, in bytes
    folder: ModelFolder | None = None
    _: KW_ONLY
    weight_dtype: str = ""  # of frozen weights that products read, if another one
    textures: bool = False  # whether matrices are in textures
    head_block: int = 1 << 30  # rows of a block of the head
    config: Mapping[str, Any] | None = None
    offload: OffloadPlan = RESIDENT
    keep: bool = False  # whether streamed layers that are quantized here are cached on disk

    def __post_init__(self) -> None:
        self.table: list[Weight] = []
        self.weight_dtype = self.weight_dtype or self.dtype
        self._policy = QuantizationPolicy(self.quant, self.folder, self.config)
        self._reader = CheckpointReader(self.folder, self.quant)
        self._codebooks: dict[bytes, Tensor] = {}

    def lay_out(self, architecture: Architecture, adapter: AdapterLayout) -> Modules:
        """The modules without their bytes, with the adapter's pairs."""
        of = architecture
        if adapter.config.changes_base:
            _refuse_shared(adapter, of)
            self._reader.changed = frozenset(f"{spec.name}.weight" for spec in adapter.targets)
        self._reader.prefixes = of.stored_prefixes
        self.placement = WeightPlacement(
            self._reader,
            self.weight_dtype if self.keep else "",
            textures=self.textures,
            first_streamed=of.num_layers - self.offload.streamed_layers,
            shared=of.shared_linears,
        )
        embedding, head = self._ends(of, adapter)
        owners = {spec.stored: spec for spec in reversed(of.linears)}
        groups = list(with_one_input(spec for spec in of.linears if owners[spec.stored] is spec))
        biases: dict[str, Tensor] = {}
        for specs in groups:
            biases |= self._biases([spec for spec in specs if spec.bias])
        linears: dict[str, Linear] = {}
        for spec in of.linears:
            if owners[spec.stored] is not spec:
                continue
            name, bias = f"{spec.stored}.weight", biases.get(spec.name)
            shape = spec.out_features, spec.in_features
            form = self._form([name], spec.in_features)
            weight: Matrix = (
                self._dense(name, *shape)
                if form is None
                else self._quantized(name, shape, form, [name])
            )
            if bias is None:
                self._reader.refuse_bias(spec.stored)
            linears[spec.name] = Linear(spec.name, weight, bias, adapter.loras.get(spec.name))
        norms = {n: self._norm(n, shape, of.offset_of(n)) for n, shape in of.norm_shapes.items()}
        experts = {stack.name: self._experts(stack, adapter) for stack in of.experts}
        routers = {
            spec.name: Linear(
                spec.name,
                self._dense(f"{spec.name}.weight", spec.out_features, spec.in_features),
                norms.get(f"{spec.name}.bias"),
                adapter.loras.get(spec.name),
            )
            for spec in of.routers
        }
        tables = {n: self._host_table(n, *shape) for n, shape in of.tables.items()}
        modules = Modules(
            embedding, head, linears, norms, experts, routers, tables,
            adapter.loras.get(of.head.name), adapter.embedding_lora, of.padding_idx,
        )  # fmt: skip
        if self.offload.dequantized:
            kept = DequantizedWeights(self.weight_dtype, self.max_binding, self.textures)
            modules = kept.within(modules, ([spec.name for spec in specs] for specs in groups))
        tied = {
            spec.name: replace(
                modules.linears[owners[spec.stored].name],
                name=spec.name,
                lora=adapter.loras.get(spec.name),
            )
            for spec in of.linears
            if owners[spec.stored] is not spec
        }
        return replace(modules, linears={**modules.linears, **tied}) if tied else modules

    def begin(self, adapter: AdapterLayout, seed: int, progress: Progress) -> str:
        """Initializes the adapter from the weights before they load; returns a note on it.

        Initial values that the adapter already has are kept.
        """
        note = ""
        if adapter.start is None:
            adapter.start, note = start_of_files(adapter, self._reader, seed, progress)
        self._reader.remove_initial_adapter(adapter)
        return note

    # -- rows of the table -----------------------------------------------------------------------

    def _ends(
        self, of: Architecture, adapter: AdapterLayout
    ) -> tuple[Matrix | HostEmbedding, Matrix]:
        vocab, hidden, tied = of.vocab_size, of.hidden_size, of.tied
        name = stored_embedding(self._reader.folder, of)
        head_name = name if tied else of.head_name
        if of.stored_rows is not None:
            self._reader.stored_rows = dict.fromkeys((name, head_name), of.stored_rows)
        embed_module = of.embed_name.removesuffix(".weight")
        head_module = embed_module if tied else of.head.name
        rows, whole = adapter.trained_rows, adapter.trained_whole
        as_head = of.embed_name if tied else of.head_name
        head: Matrix
        if of.classes:
            head = self._score_head(of, adapter)
        elif self.offload.streamed_head:
            if head_module in whole:
                raise ConfigError(
                    f"lora.modules_to_save trains the whole {head_name}, which cannot be "
                    "offloaded: leave it out, or raise device.memory"
                )
            host = HostEmbedding(vocab, hidden, self.weight_dtype, trained=rows.get(head_module))
            head = self._streamed_head(head_name, as_head, host)
        else:
            head = self._dense(
                head_name, vocab, hidden, "", rows.get(head_module), whole.get(head_module),
                called=as_head,
            )  # fmt: skip
        if tied:
            return head.host if isinstance(head, StreamedMatrix) else head, head
        own, matrix = rows.get(embed_module), whole.get(embed_module)
        if self.offload.host_embedding and matrix is None:
            table = HostEmbedding(vocab, hidden, self.dtype, trained=own)
            return self._host("embedding", name, of.embed_name, table), head
        return self._dense(name, vocab, hidden, self.dtype, own, matrix, called=of.embed_name), head

    def _score_head(self, of: Architecture, adapter: AdapterLayout) -> ScoreHead:
        """The head of a reward model or classifier, which a language model's files lack."""
        whole, shape = adapter.trained_whole[of.head.name], (of.classes, of.hidden_size)
        if self._reader.find(of.head_name) is None:
            adapter.new_head = of.head.name
            whole.originals = lambda: np.zeros(shape, np.float32)
        else:
            whole.originals = partial(self._reader.read, of.head_name, shape)
        return ScoreHead(*shape, whole)

    def _form(self, names: Sequence[str], columns: int) -> WeightFormat | None:
        return self._policy.of([self._reader.stored(name) for name in names], columns)

    def _experts(self, stack: ExpertSpec, adapter: AdapterLayout) -> ExpertLinear:
        names = [f"{spec.name}.weight" for spec in stack.linears]
        shape = stack.out_features, stack.in_features
        form = self._form(names, stack.in_features)
        weight: ExpertMatrix = (
            self._dense_experts(stack.name, shape, names)
            if form is None
            else self._quantized(f"{stack.name}.weight", shape, form, names)
        )
        bias = None
        if stack.bias:
            every = f"{stack.at}.*.{stack.leaf}.bias"
            bias = self._norm(every, (stack.experts, stack.out_features))
        return ExpertLinear(stack.name, weight, adapter.expert_loras.get(stack.name), bias)

    def _norm(self, name: str, shape: tuple[int, ...], offset: float = 0.0) -> Tensor:
        """A norm: a row, a matrix with a row for each head, or a number; padded to whole units."""
        parts = stored_parts(name, shape)
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        storage = Storage(name, "norms", 4 * rows * padded(columns))
        held = row(name, columns, "float32", storage)
        if len(shape) > 1:
            held = matrix(name, rows, columns, "float32", storage)

        def read(reader: CheckpointReader) -> Iterator[Filled]:
            array = np.stack([reader.read(*part) for part in parts]).reshape(rows, columns)
            yield storage, pad_rows(array + np.float32(offset))

        self.table.append(Weight(name, parts, held, read, offset=offset))
        return held

    def _biases(self, specs: list[LinearSpec]) -> dict[str, Tensor]:
        """Biases of layers of one input, in one storage, aligned for bindings."""
        begins = [0]
        for spec in specs:
            begins.append(begins[-1] + round_up(padded(spec.out_features), ALIGNMENT // 4))
        storage = Storage("biases", "norms", 4 * begins[-1])
        arrays: list[npt.NDArray[np.float32]] = []

        def read(name: str, shape: tuple[int, ...], reader: CheckpointReader) -> Iterator[Filled]:
            arrays.append(reader.read(name, shape))
            if len(arrays) == len(specs):
                whole = np.zeros(storage.nbytes // 4, np.float32)
                for begin, array in zip(begins, arrays, strict=False):
                    whole[begin : begin + array.size] = array
                arrays.clear()
                yield storage, whole

        biases = {}
        for spec, begin in zip(specs, begins, strict=False):
            name, shape = f"{spec.stored}.bias", (spec.out_features,)
            bias = biases[spec.name] = row(name, *shape, "float32", storage, 4 * begin)
            self.table.append(Weight(name, [(name, shape)], bias, partial(read, name, shape)))
        return biases

    def _dense(
        self,
        name: str,
        rows: int,
        columns: int,
        dtype: str = "",
        trained: TrainableTokens | None = None,
        whole: SavedModule | None = None,
        called: str = "",
    ) -> DenseMatrix:
        """A matrix, resident or streamed with its layer, in shards that fit a binding.

        ``trained`` and ``whole`` receive the initial values of what they replace.
        """
        dtype = dtype or self.weight_dtype
        row_bytes = matrix("", 1, columns, dtype).nbytes
        most = shard_rows(row_bytes, self.max_binding, self.head_block)
        pieces: list[tuple[int, Tensor]] = []
        for row0, count in row_pieces(rows, most):
            storage = self.placement.dense_storage(name, count * row_bytes)
            pieces.append((row0, matrix(name, count, columns, dtype, storage)))
        layer = self.placement.dense_layer_of(name)
        self.placement.expect_load(self._reader.loading_bytes(name, rows, columns, dtype))
        if layer is not None:
            layer.as_stored &= self._reader.is_as_stored(name, columns, dtype)

        def read(reader: CheckpointReader) -> Iterator[Filled]:
            bits = reader.read_bits(name, (rows, columns), dtype)
            keep_originals(trained, bits, columns, dtype)
            for row0, piece in pieces:
                assert piece.storage is not None
                yield piece.storage, bits[row0 : row0 + piece.rows]

        held = DenseMatrix(rows, columns, tuple(pieces), trained, whole)
        parts = [(called or name, (rows, columns))]
        self.table.append(Weight(name, parts, held, read, layer))
        if whole is not None:
            whole.originals = partial(self._reader.read, name, (rows, columns))
        return held

    def _dense_experts(self, name: str, shape: Shape, names: list[str]) -> DenseExperts:
        """The matrices of all experts, stacked as far as a binding allows."""
        dtype, (rows, columns) = self.weight_dtype, shape
        one = matrix("", rows, columns, dtype).nbytes
        most = max(self.max_binding // one, 1)
        pieces: list[tuple[int, int, Tensor]] = []
        for first, count in row_pieces(len(names), most):
            storage = self.placement.dense_storage(name, count * one)
            self.placement.expect_load(3 * count * 4 * rows * columns)
            pieces.append((first, count, matrix(name, count * rows, columns, dtype, storage)))
        layer = self.placement.dense_layer_of(name)
        if layer is not None:
            layer.as_stored = False

        def read(reader: CheckpointReader) -> Iterator[Filled]:
            for first, count, piece in pieces:
                group = names[first : first + count]
                array = np.concatenate([reader.read(each, shape) for each in group])
                assert piece.storage is not None
                yield piece.storage, bits_of(group[0], array, dtype)

        held = DenseExperts(len(names), rows, columns, tuple(pieces))
        self.table.append(Weight(name, [(each, shape) for each in names], held, read, layer))
        return held

    def _quantized(
        self, name: str, shape: Shape, form: WeightFormat, names: Sequence[str]
    ) -> QuantizedMatrix:
        codebook, key = None, form.quant_map.tobytes()
        if self.textures and fits_words(form, shape[1]):
            if key not in self._codebooks:
                self._codebooks[key] = codebook_tensor(form, Storage)
            codebook = self._codebooks[key]
        keep = partial(self.placement.storage, name, most=self.max_binding)
        held, storages = lay_out(name, shape, form, len(names), keep, codebook)
        layer = self.placement.layer_of(name)
        stored = self._reader.find(names[0]) if len(names) == 1 else None
        is_mapped = stored is not None and stored.is_mapped
        if not is_mapped:
            quantized = sum(storage.nbytes for storage in storages.values())
            self.placement.expect_load(4 * math.prod(shape) + min(len(names), 2) * quantized)
        if layer is not None:
            layer.as_stored &= is_mapped
            layer.copied += sum(storages[leaf].nbytes for leaf in storages if leaf in _COPIED)

        def read(reader: CheckpointReader) -> Iterator[Filled]:
            assert reader.folder is not None
            quantized = [*map(reader.quantized, names, repeat(shape))]
            arrays = stacked_arrays(quantized, name, reader.folder.path)
            for leaf, storage in storages.items():
                yield storage, arrays[leaf]

        self.table.append(Weight(name, [(each, shape) for each in names], held, read, layer))
        return held

    def _host_table(self, name: str, rows: int, columns: int) -> HostEmbedding:
        """A further table in host memory; one stored in bfloat16 stays so."""
        stays = self._reader.is_as_stored(name, columns, "bfloat16")
        held = HostEmbedding(rows, columns, "bfloat16" if stays else self.dtype)
        return self._host(name, name, name, held)

    def _streamed_head(self, name: str, called: str, host: HostEmbedding) -> StreamedMatrix:
        stream, most = self.placement.stream, self.max_binding
        held = streamed_matrix(name, host, stream, most, self.head_block)
        self._host("lm_head", name, called, host, held)
        return held

    def _host(
        self, kind: str, name: str, called: str, held: HostEmbedding,
        streamed: StreamedMatrix | None = None,
    ) -> HostEmbedding:  # fmt: skip
        """A matrix in host memory, whose rows the host looks up or whose blocks are streamed."""
        shape = held.rows, held.columns

        def read(reader: CheckpointReader) -> Iterator[Filled]:
            held.values = reader.read_bits(name, shape, held.dtype)
            keep_originals(held.trained, held.values, held.columns, held.dtype)
            if streamed is not None:
                fill(streamed, held.values)
            yield from ()

        self.placement.on_host[kind] = held
        held.as_stored = self._reader.is_as_stored(name, held.columns, held.dtype)
        if not held.as_stored:  # memory for reading it, besides its own bytes
            taken = self._reader.loading_bytes(name, *shape, held.dtype)
            self.placement.expect_load(taken - held.nbytes)
        self.table.append(Weight(name, [(called, shape)], streamed or held, read))
        return held


def with_one_input(specs: Iterable[LinearSpec]) -> Iterator[list[LinearSpec]]:
    """Groups neighbours of one module with the same number of inputs, such as q, k and v."""
    for _, some in groupby(specs, lambda s: (s.name.rpartition(".")[0], s.in_features)):
        yield list(some)


def _refuse_shared(adapter: AdapterLayout, of: Architecture) -> None:
    for spec in adapter.targets:
        if spec.tied_to or spec.stored in of.shared_linears:
            raise ConfigError(
                f"lora.init_lora_weights cannot change the weight of {spec.name}, which other "
                "layers share: leave it out of lora.target_modules, or use another initialization"
            )
