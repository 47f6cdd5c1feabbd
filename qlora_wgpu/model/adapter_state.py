"""An adapter's values on the device, and whether an adapter from a file fits them."""

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
    """How a base is laid out to take an adapter of a file as it was trained.

    Returns:
        The settings, the tensors, their PEFT config, and the start if that is a part of the base.
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
    """The settings that a base is laid out with to take an adapter of a file."""
    adapted = {layer.module for layer in adapted_layers(tensors)}
    config = lora_config(stored, adapted, architecture.experts, architecture.routers)
    idle = {  # which PEFT passes over
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
    """Overwrites a vector."""
    assert tensor.storage is not None
    if tensor.storage.on_host is not None:
        tensor.storage.on_host[:] = values
        return
    allocate(device, tensor.storage)
    if tensor.dtype == "bfloat16":
        values = stored_bits(values, tensor.dtype)
    device.write(tensor.storage.buffer, values, tensor.offset)


def read_flat(device: Device, flat: Tensor | ShardedVector) -> npt.NDArray[Any]:
    """The values of a vector that may be sharded, as ``read_vector`` gives them."""
    shards = [read_vector(device, shard) for shard in as_sharded(flat).shards]
    return shards[0] if len(shards) == 1 else np.concatenate(shards)


def write_flat(device: Device, flat: Tensor | ShardedVector, values: npt.NDArray[Any]) -> None:
    """Overwrites a vector that may be sharded; a single shard may be padded beyond it."""
    sharded = as_sharded(flat)
    if len(sharded.shards) == 1:
        write_vector(device, sharded.whole, values)
        return
    for begin, shard in sharded.numbered():
        write_vector(device, shard, values[begin : begin + shard.columns])


def neutral_parameters(programs: Programs) -> FloatArray:
    """A flat adapter that changes nothing.

    That is zeros, but for trained tokens and matrices, which are the base's own, and DoRA's
    magnitudes, which are the norms of the base's rows. An adapter that began as a part of the base
    is neutral as it began. A device that does not compute leaves the norms to one that does, by
    ``norms_graph``.
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
    """The norms of the rows of a base's layer."""
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
    """Reads an adapter from files for one that is laid out, without the base's weights.

    Returns:
        Its tensors without biases, and its biases by modules.
    """
    read, config = load_adapter(Path(folder), biases=True, stacking=architecture.stacking)
    tensors, stored = read_started(folder, read, config, adapter)
    shapes = adapter_shapes(architecture, stored)
    refuse_other_base(folder, stored, tensors, shapes, base, whole=False)
    check_scaling(stored, adapter, folder)
    return split_biases(tensors)


def check_scaling(stored: AdapterConfig, adapter: AdapterLayout, path: str | PathLike[str]) -> None:
    """Refuses an adapter that would be scaled otherwise than it was trained."""
    own = adapter.peft
    keys = ("r", "lora_alpha", "use_rslora", "use_dora", "trainable_token_indices")
    if other := [key for key in keys if getattr(stored, key) != getattr(own, key)]:
        made = " and ".join(f"{key} = {getattr(stored, key)}" for key in other)
        opened = " and ".join(str(getattr(own, key)) for key in other)
        settings = ", ".join(f"lora.{key}={getattr(stored, key)}" for key in other)
        raise CheckpointError(
            f"{path}: the adapter was made with {made}, but this model was opened with {opened}: "
            f"open it with the adapter's LoraConfig (of a run: {settings})"
        )
    for spec in adapter.adapted:
        if stored.scaling_of(spec.name) != own.scaling_of(spec.name):
            raise CheckpointError(
                f"{path}: the adapter scales {spec.name} by {stored.scaling_of(spec.name):g}, but "
                f"this model was opened to scale it by {own.scaling_of(spec.name):g}: open it "
                "with the adapter's LoraConfig"
            )


def read_started(
    folder: str | PathLike[str],
    tensors: Mapping[str, FloatArray],
    stored: AdapterConfig,
    adapter: AdapterLayout,
) -> tuple[Mapping[str, FloatArray], AdapterConfig]:
    """An adapter's tensors and settings, without the conversion of one that began in its base.

    That start has to be the one of the adapter that is laid out.
    """
    if adapter.start is None:
        return tensors, stored
    pairs, _ = split_biases(tensors)
    started = started_in(folder, pairs, stored)
    own = adapter.split(adapter.start)
    if started is None or not _same(started.start, own):
        raise CheckpointError(
            f"{folder}: the base of this model is without the part that its own adapter began as, "
            "which is not this one's: qlora_wgpu.open_adapter opens it as it was trained"
        )
    return started.tensors, started.config


def _same(one: Mapping[str, FloatArray], other: Mapping[str, FloatArray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def warn_if_trained_otherwise(adapter: str | PathLike[str], quant: QuantConfig) -> None:
    """Warns whoever loads an adapter whose run quantized the base otherwise, by its config.yaml.

    A base that is opened without quantization was asked for so, and is not warned of.
    """
    run = find_run(adapter)
    if run is None or quant.scheme == "none":
        return
    try:
        trained = config_of_run(run).quant
    except ConfigError:
        return  # the run's own file is damaged: nothing is known
    own = quant.model_dump()
    other = [f"{key} = {v}" for key, v in trained.model_dump().items() if v != own[key]]
    if other:
        warnings.warn(
            f"{adapter} was trained on a base quantized with {', '.join(other)}, which this model "
            "was not opened with: qlora_wgpu.open_adapter opens it as it was trained",
            stacklevel=4,
        )


# ---- the base's own parameters ---------------------------------------------------------------


class AdapterBiases:
    """The base's biases that an adapter of a file replaces."""

    def __init__(self, programs: Programs) -> None:
        """Replaces nothing yet."""
        self._modules, self._device = programs.plan.modules, programs.device
        self._taken: dict[str, FloatArray] = {}
        self._base: dict[str, FloatArray] = {}

    @property
    def kind(self) -> str:
        """PEFT's word for what is replaced: "all", which also loads what "lora_only" means."""
        return "all" if self._taken else "none"

    @property
    def taken(self) -> Mapping[str, FloatArray]:
        """What is replaced, by the names of the layers."""
        return self._taken

    def check(self, biases: Mapping[str, FloatArray]) -> None:
        """Makes sure that the base has biases of these layers and sizes."""
        for name, array in biases.items():
            self._place(name, array)

    def tensors(self) -> dict[str, FloatArray]:
        """What is replaced, by the names that an adapter's tensors have."""
        return {bias_name(module): array for module, array in self._taken.items()}

    def take(self, biases: Mapping[str, FloatArray]) -> None:
        """Replaces the base's biases by an adapter's; those of an adapter before it go."""
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
        """Within the context, the base has its own biases."""
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
                f"the adapter has a trained bias of {name} of {array.size} numbers, which this "
                "model has not, or neither a linear layer nor a norm: open it with the model that "
                "it was trained on, or merge it with PEFT"
            )
        return bias


def base_state_dict(programs: Programs) -> dict[str, FloatArray]:
    """Every weight by Hugging Face's name, float32."""
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
    """A weight as it is stored, (rows, columns); experts one below the other."""
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
