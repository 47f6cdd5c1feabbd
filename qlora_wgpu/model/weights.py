"""Frozen weights on the device: which form each takes, its bytes, and its upload.

The same code lays out a model whose weights are still to be seen (for a plan) and one that is
loaded. Each tensor is read, quantized, uploaded and forgotten before the next, so host memory
stays near one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import Architecture, ExpertSpec, LinearSpec, Modules
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.model.adapter_init import start_of_files
from qlora_wgpu.model.checkpoint_reader import WeightSource, stored_embedding
from qlora_wgpu.model.dense_weights import DenseWeights, with_one_input
from qlora_wgpu.model.derived_weights import KeptWeights
from qlora_wgpu.model.offload_plan import RESIDENT, Residency
from qlora_wgpu.model.pretrained import StorageForms
from qlora_wgpu.model.quantized_weights import QuantizedLayout
from qlora_wgpu.model.weight_loader import Progress
from qlora_wgpu.model.weight_placement import HostWeights, WeightPlaces
from qlora_wgpu.ops.modules import (
    ExpertLinear,
    ExpertMatrix,
    HostMatrix,
    Linear,
    Matrix,
    StreamedMatrix,
)


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
        self._head_block = head_block
        self._residency = residency
        self._kept = KeptWeights(self._weight_dtype, max_binding, textures)
        self._source = WeightSource(folder, quant)
        made_from = partial(self._source.made_from, self._weight_dtype) if keep else _nothing
        self.places = WeightPlaces(
            device, made_from, self._source.requantization,
            textures=textures, reads=folder is not None,
        )  # fmt: skip
        self._dense = DenseWeights(
            self._source, self.places, self._weight_dtype, max_binding, head_block
        )
        self._host = HostWeights(self._source, self.places)
        self._quantized = QuantizedLayout(self._source, self.places, max_binding, textures=textures)

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
        self._source.prefixes = architecture.stored_prefixes
        self.places.first_streamed = architecture.num_layers - self._residency.streamed_layers
        embedding, head = self._ends(architecture, adapter)
        biases = self._dense.biases(architecture.linears)
        linears = {
            spec.name: self._linear(spec, adapter, biases.get(spec.name))
            for spec in architecture.linears
        }
        norms = {
            n: self._dense.norm(n, shape, np.float32(architecture.offset_of(n)))
            for n, shape in architecture.norm_shapes.items()
        }
        experts = {stack.name: self._experts(stack, adapter) for stack in architecture.experts}
        routers = {n: self._dense.dense(n, *shape) for n, shape in architecture.routers.items()}
        tables = {
            n: self._host.table(n, *shape, self._dtype) for n, shape in architecture.tables.items()
        }
        head_lora = adapter.loras.get(architecture.head.name)
        modules = Modules(
            embedding, head, linears, norms, experts, routers, tables, head_lora,
            adapter.embedding_lora, architecture.padding_idx,
        )  # fmt: skip
        if not self._residency.dequantized:
            return modules
        groups = with_one_input(architecture.linears)
        return self._kept.within(modules, ([spec.name for spec in specs] for specs in groups))

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

    # -- layers ------------------------------------------------------------------------------

    def _ends(
        self, architecture: Architecture, adapter: Adapter
    ) -> tuple[Matrix | HostMatrix, Matrix]:
        """The embedding and the head, which may be one matrix."""
        vocab, hidden = architecture.vocab_size, architecture.hidden_size
        name, tied = stored_embedding(self._source.folder, architecture), architecture.tied
        head_name = name if tied else architecture.head_name
        if architecture.stored_rows is not None:
            self._source.stored_rows = dict.fromkeys((name, head_name), architecture.stored_rows)
        embed_module = architecture.embed_name.removesuffix(".weight")
        head_module = embed_module if tied else architecture.head.name
        trained, whole = adapter.trained_rows, adapter.trained_whole
        head: Matrix
        if self._residency.streamed_head:
            if head_module in whole:
                raise ConfigError(
                    f"lora.modules_to_save trains {head_name} whole, which cannot wait in host "
                    "memory: leave it out, or raise device.memory"
                )
            host = HostMatrix(vocab, hidden, self._weight_dtype, trained=trained.get(head_module))
            head = self._host.streamed_head(head_name, host, self._max_binding, self._head_block)
        else:
            head = self._dense.dense(
                head_name, vocab, hidden, "", trained.get(head_module), whole.get(head_module)
            )
        if tied:
            return head.host if isinstance(head, StreamedMatrix) else head, head
        rows, matrix = trained.get(embed_module), whole.get(embed_module)
        if self._residency.host_embedding and matrix is None:
            return self._host.embedding(name, vocab, hidden, self._dtype, rows), head
        return self._dense.dense(name, vocab, hidden, self._dtype, rows, matrix), head

    def _linear(self, spec: LinearSpec, adapter: Adapter, bias: Tensor | None) -> Linear:
        name = f"{spec.name}.weight"
        shape = spec.out_features, spec.in_features
        form = self._forms.of([self._source.stored(name)], spec.in_features)
        weight: Matrix = (
            self._dense.dense(name, *shape)
            if form is None
            else self._quantized.matrix(name, shape, form, [name])
        )
        if bias is None:
            self._source.refuse_bias(spec.name)
        return Linear(spec.name, weight, bias, adapter.loras.get(spec.name))

    def _experts(self, stack: ExpertSpec, adapter: Adapter) -> ExpertLinear:
        names = [f"{spec.name}.weight" for spec in stack.linears]
        shape = stack.out_features, stack.in_features
        form = self._forms.of([self._source.stored(name) for name in names], stack.in_features)
        weight: ExpertMatrix = (
            self._dense.experts(stack.name, *shape, names)
            if form is None
            else self._quantized.matrix(f"{stack.name}.weight", shape, form, names)
        )
        bias = None
        if stack.bias:
            every = f"{stack.at}.*.{stack.leaf}.bias"
            bias = self._dense.norm(every, (stack.experts, stack.out_features))
        return ExpertLinear(stack.name, weight, adapter.expert_loras.get(stack.name), bias)


def _nothing() -> None:
    """Says that nothing is kept."""
