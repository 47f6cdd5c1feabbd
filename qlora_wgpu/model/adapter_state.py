"""An adapter's values on the device, and adapters from files that replace them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.config.loading import config_of_run, find_run
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.gpu.device import UPLOAD_CHUNK, Device
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.program import allocate
from qlora_wgpu.graph.sharded_vector import ShardedVector, as_sharded
from qlora_wgpu.graph.tensor import ITEM_SIZE, Tensor, stored_bits, stored_floats
from qlora_wgpu.lora import AdapterConfig, load_adapter
from qlora_wgpu.lora.compatibility import adapter_shapes, refuse_other_base
from qlora_wgpu.lora.config import unfitting
from qlora_wgpu.lora.init import started_in
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.peft_names import (
    MAGNITUDE,
    TOKENS,
    WHOLE,
    adapted_layers,
    bias_name,
    split_biases,
)
from qlora_wgpu.lora.targets import known_targets, lora_config
from qlora_wgpu.lora.trained_tokens import Vocabulary
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.programs import Programs
from qlora_wgpu.model.weight_placement import Held
from qlora_wgpu.ops import dora
from qlora_wgpu.ops.modules import DenseMatrix, HostEmbedding, StreamedMatrix
from qlora_wgpu.ops.quantized import QuantizedMatrix

FloatArray = npt.NDArray[np.float32]


# ---- settings --------------------------------------------------------------------------------


def as_begun(
    folder: str | PathLike[str],
    stored: AdapterConfig,
    tensors: Mapping[str, FloatArray],
    architecture: Architecture,
) -> tuple[LoraConfig, Mapping[str, FloatArray], AdapterConfig, Mapping[str, FloatArray] | None]:
    """How a base is laid out for an adapter from a file, exactly as it was trained.

    Returns the settings, the tensors, their PEFT config, and the initial values if these are a part
    of the base.
    """
    pairs, _ = split_biases(tensors)
    started = started_in(folder, pairs, stored)
    if started is None:
        return config_of(stored, tensors, architecture), tensors, stored, None
    own = config_of(started.config, started.tensors, architecture)
    own = own.model_copy(update={"init_lora_weights": started.kind})
    return own, started.tensors, started.config, started.start


def config_of(
    stored: AdapterConfig, tensors: Mapping[str, FloatArray], architecture: Architecture
) -> LoraConfig:
    """The settings with which a base is laid out for an adapter from a file."""
    adapted = {layer.module for layer in adapted_layers(tensors)}
    config = lora_config(stored, adapted, architecture.experts, architecture.routers)
    idle = {  # which PEFT ignores
        key: unfitting(getattr(config, key), adapted) for key in ("rank_pattern", "alpha_pattern")
    }
    if any(idle.values()):
        kept = {
            key: {p: value for p, value in getattr(config, key).items() if p not in unfit}
            for key, unfit in idle.items()
        }
        config = config.model_copy(update=kept)
    if isinstance(config.target_modules, str):
        return config
    ends = Vocabulary.of(architecture)
    every = [
        *architecture.every_linear, *architecture.routers, ends.head_layer, ends.embedding_layer
    ]  # fmt: skip
    known = known_targets(config.target_modules, every, architecture.experts)
    return config.model_copy(update={"target_modules": known})


# ---- vectors on the device -------------------------------------------------------------------


def read_vector(device: Device, tensor: Tensor) -> npt.NDArray[Any]:
    """A vector's values, float32 unless they are uint32; waits for the device."""
    assert tensor.storage is not None
    if tensor.storage.on_host is not None:
        return tensor.storage.on_host.copy()
    allocate(device, tensor.storage)
    of_words, size = tensor.dtype == "uint32", ITEM_SIZE[tensor.dtype]
    values = np.empty(tensor.nbytes // size, np.uint32 if of_words else np.float32)
    for begin in range(0, tensor.nbytes, UPLOAD_CHUNK):  # the staging buffer is no larger
        nbytes = min(UPLOAD_CHUNK, tensor.nbytes - begin)
        raw = device.read(tensor.storage.buffer, nbytes, tensor.offset + begin)
        part = np.frombuffer(raw, np.uint32) if of_words else stored_floats(raw, tensor.dtype)
        values[begin // size : (begin + nbytes) // size] = part
    return values


def write_vector(device: Device, tensor: Tensor, values: npt.NDArray[Any]) -> None:
    assert tensor.storage is not None
    if tensor.storage.on_host is not None:
        tensor.storage.on_host[:] = values
        return
    allocate(device, tensor.storage)
    if tensor.dtype == "bfloat16":
        values = stored_bits(values, tensor.dtype)
    device.write(tensor.storage.buffer, values, tensor.offset)


def read_flat(device: Device, flat: Tensor | ShardedVector) -> npt.NDArray[Any]:
    """The values of a vector that may be sharded; see ``read_vector``."""
    shards = [read_vector(device, shard) for shard in as_sharded(flat).shards]
    return shards[0] if len(shards) == 1 else np.concatenate(shards)


def write_flat(device: Device, flat: Tensor | ShardedVector, values: npt.NDArray[Any]) -> None:
    """Overwrites a vector that may be sharded; a single shard may be padded."""
    sharded = as_sharded(flat)
    if len(sharded.shards) == 1:
        write_vector(device, sharded.whole, values)
        return
    for begin, shard in sharded.numbered():
        write_vector(device, shard, values[begin : begin + shard.columns])


def neutral_parameters(programs: Programs) -> FloatArray:
    """A flat adapter that changes nothing.

    It is zero, except for trained tokens and matrices, which are the base's own, and DoRA's
    magnitudes, which are the norms of the base's rows. For an adapter that started as a part of the
    base, it is these initial values. A device that does not compute leaves the norms to one that
    does, by ``norms_graph``.
    """
    plan, device, adapter = programs.plan, programs.device, programs.plan.adapter
    if adapter.start is not None:
        return adapter.start
    flat = np.zeros(adapter.length, np.float32)
    for module, trained in adapter.trained_rows.items():
        assert trained.originals is not None
        adapter.place(module, TOKENS).view(flat)[:] = trained.originals
    for module, whole in adapter.trained_whole.items():
        assert whole.originals is not None
        adapter.place(module, WHOLE).view(flat)[:] = whole.originals()
    if not adapter.config.use_dora or not device.computes:
        return flat
    write_flat(device, adapter.parameters, flat)
    for name in adapter.loras:
        graph, norms = norms_graph(plan, name)
        program = programs.from_graph(graph, (norms,))
        program.run()
        first = adapter.place(name, MAGNITUDE).offset
        flat[first : first + norms.columns] = np.frombuffer(program.read(norms), np.float32)
    return flat


def norms_graph(plan: ModelPlan, name: str) -> tuple[Graph, Tensor]:
    weight, graph = plan.modules.linears[name].weight, plan.new_graph()
    norms = graph.float_vector("norms", weight.rows)
    for row0, w in weight.shards(graph):
        dora.norm(graph, w, plan.adapter.loras[name], norms, row0, 0.0, plain=True)
    return graph, norms


# ---- adapters of files -----------------------------------------------------------------------


def read_fitting(
    folder: str | PathLike[str],
    adapter: AdapterLayout,
    architecture: Architecture,
    base: str | PathLike[str],
) -> tuple[Mapping[str, FloatArray], Mapping[str, FloatArray]]:
    """Tensors, and biases by module, of an adapter from files for one that is laid out."""
    read, config = load_adapter(Path(folder), biases=True, stacking=architecture.stacking)
    tensors, stored = read_started(folder, read, config, adapter)
    shapes = adapter_shapes(architecture, stored)
    refuse_other_base(folder, stored, tensors, shapes, base, whole=False)
    check_scaling(stored, adapter, folder)
    return split_biases(tensors)


def check_scaling(stored: AdapterConfig, adapter: AdapterLayout, path: str | PathLike[str]) -> None:
    """Refuses an adapter that would be scaled differently from its training."""
    own = adapter.peft
    keys = ("r", "lora_alpha", "use_rslora", "use_dora", "trainable_token_indices")
    if other := [key for key in keys if getattr(stored, key) != getattr(own, key)]:
        made = " and ".join(f"{key} = {getattr(stored, key)}" for key in other)
        opened = " and ".join(str(getattr(own, key)) for key in other)
        settings = ", ".join(f"lora.{key}={getattr(stored, key)}" for key in other)
        raise CheckpointError(
            f"{path}: the adapter was trained with {made}, but this model was opened with "
            f"{opened}: open it with the adapter's LoraConfig (of a run: {settings})"
        )
    for spec in adapter.adapted:
        if stored.scaling_of(spec.name) != own.scaling_of(spec.name):
            raise CheckpointError(
                f"{path}: the adapter scales {spec.name} by {stored.scaling_of(spec.name):g}, but "
                f"this model was opened with a scaling of {own.scaling_of(spec.name):g}: open it "
                "with the adapter's LoraConfig"
            )


def read_started(
    folder: str | PathLike[str],
    tensors: Mapping[str, FloatArray],
    stored: AdapterConfig,
    adapter: AdapterLayout,
) -> tuple[Mapping[str, FloatArray], AdapterConfig]:
    """An adapter's tensors and settings; undoes the conversion of one that started as base parts.

    Its initial values must be those of the adapter that is laid out.
    """
    if adapter.start is None:
        return tensors, stored
    pairs, _ = split_biases(tensors)
    started = started_in(folder, pairs, stored)
    own = adapter.split(adapter.start)
    if started is None or not _same(started.start, own):
        raise CheckpointError(
            f"{folder}: this model's base lacks the part that another adapter started as: use "
            "qlora_wgpu.open_adapter, which opens this one as it was trained"
        )
    return started.tensors, started.config


def _same(one: Mapping[str, FloatArray], other: Mapping[str, FloatArray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def warn_if_quantized_differently(adapter: str | PathLike[str], quant: QuantConfig) -> None:
    """Warns if an adapter's run, by its config.yaml, quantized the base differently.

    Opening a base without quantization is deliberate and causes no warning.
    """
    run = find_run(adapter)
    if run is None or quant.scheme == "none":
        return
    try:
        trained = config_of_run(run).quant
    except ConfigError:
        return  # the run's own file is damaged
    own = quant.model_dump()
    other = [f"{key} = {v}" for key, v in trained.model_dump().items() if v != own[key]]
    if other:
        warnings.warn(
            f"{adapter} was trained on a base quantized with {', '.join(other)}, unlike this "
            "model: use qlora_wgpu.open_adapter, which opens it as it was trained",
            stacklevel=4,
        )


# ---- the base's own parameters ---------------------------------------------------------------


class AdapterBiases:
    """The base's biases that an adapter from a file replaces."""

    def __init__(self, programs: Programs) -> None:
        self._modules, self._device = programs.plan.modules, programs.device
        self._taken: dict[str, FloatArray] = {}
        self._base: dict[str, FloatArray] = {}

    @property
    def kind(self) -> str:
        """PEFT's ``bias`` for what is replaced: "all", which covers "lora_only"."""
        return "all" if self._taken else "none"

    @property
    def taken(self) -> Mapping[str, FloatArray]:
        return self._taken

    def check(self, biases: Mapping[str, FloatArray]) -> None:
        for name, array in biases.items():
            self._place(name, array)

    def tensors(self) -> dict[str, FloatArray]:
        return {bias_name(module): array for module, array in self._taken.items()}

    def take(self, biases: Mapping[str, FloatArray]) -> None:
        """Replaces the base's biases by an adapter's, and restores those replaced before."""
        places = {name: self._place(name, array) for name, array in biases.items()}
        for name, own in self._base.items():
            write_vector(self._device, self._place(name, own), own)
        for name, array in biases.items():
            whole = read_vector(self._device, places[name])
            self._base.setdefault(name, whole[: array.size].copy())
            write_vector(self._device, places[name], array)
        self._taken = dict(biases)

    @contextmanager
    def off(self) -> Iterator[None]:
        taken = self._taken
        self.take({})
        try:
            yield
        finally:
            self.take(taken)

    def _place(self, name: str, array: FloatArray) -> Tensor:
        modules = self._modules
        layer = modules.linears.get(name)
        bias = modules.norms.get(f"{name}.bias") if layer is None else layer.bias
        if bias is None or bias.columns != array.size:
            raise CheckpointError(
                f"the adapter has a trained bias of {name} with {array.size} numbers, which does "
                "not fit a linear layer or norm of this model: open it with the model that it was "
                "trained on, or merge it with PEFT"
            )
        return bias


def base_state_dict(programs: Programs) -> dict[str, FloatArray]:
    """All weights by Hugging Face's names, float32."""
    state: dict[str, FloatArray] = {}
    plan = programs.plan
    for weight in plan.weights.table:
        whole = _values(weight.held, programs) - np.float32(weight.offset)
        arrays = np.split(whole, len(weight.parts))
        for (name, shape), array in zip(weight.parts, arrays, strict=True):
            state[name] = array.reshape(shape)
    for module, trained in plan.adapter.trained_rows.items():
        state[f"{module}.weight"][list(trained.indices)] = trained.originals
    for module, matrix in plan.adapter.trained_whole.items():
        assert matrix.originals is not None
        state[f"{module}.weight"] = matrix.originals()
    return state


def _values(held: Held, programs: Programs) -> FloatArray:
    """A weight, (rows, columns); experts are stacked."""
    if isinstance(held, Tensor):
        return read_vector(programs.device, held).reshape(held.rows, -1)[:, : held.columns]
    if isinstance(held, StreamedMatrix):
        held = held.host
    if isinstance(held, HostEmbedding):
        rows = held.taken(np.arange(held.rows))
        values = stored_floats(rows.data.cast("B"), held.dtype).reshape(rows.shape)
        return values[:, : held.columns]
    graph = programs.plan.new_graph()
    shards: list[Tensor]
    if isinstance(held, DenseMatrix) or (isinstance(held, QuantizedMatrix) and held.experts == 1):
        shards = [shard for _, shard in held.shards(graph)]
    else:
        shards = [shard for _, _, shard in held.expert_shards(graph)]
    program = programs.from_graph(graph, tuple(shards))
    program.run()
    return np.concatenate([_rows(shard, program.read(shard)) for shard in shards])


def _rows(shard: Tensor, raw: memoryview) -> FloatArray:
    array = stored_floats(raw, shard.dtype)
    return array.reshape(shard.rows, shard.stride)[:, : shard.columns]
