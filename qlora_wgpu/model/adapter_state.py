"""The adapter's flat vectors on the device, and whether an adapter from a file fits them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import LoraConfig, QuantConfig, load_config
from qlora_wgpu.config.as_trained import find_run
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.transfers import UPLOAD_CHUNK
from qlora_wgpu.graph.dtype import ITEM_SIZE, stored_bits, stored_floats
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.pieces import Pieces, in_pieces
from qlora_wgpu.graph.program import allocate
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.lora import AdapterConfig, load_adapter
from qlora_wgpu.lora.biases import split_biases
from qlora_wgpu.lora.conversion import started_in
from qlora_wgpu.lora.fitting import adapter_shapes, refuse_other_base
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.lora.names import MAGNITUDE, TOKENS, WHOLE, adapted_layers
from qlora_wgpu.lora.patterns import unfitting
from qlora_wgpu.lora.targets import known_targets, lora_config
from qlora_wgpu.lora.tokens import Vocabulary
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.programs import Programs
from qlora_wgpu.ops import dora

FloatArray = npt.NDArray[np.float32]


def as_begun(
    folder: str | PathLike[str],
    stored: AdapterConfig,
    tensors: Mapping[str, FloatArray],
    architecture: Architecture,
) -> tuple[LoraConfig, Mapping[str, FloatArray], AdapterConfig, Mapping[str, FloatArray] | None]:
    """How a base is laid out to take an adapter of a file as it was trained.

    Args:
        folder: The adapter's folder.
        stored: Its settings, as ``load_adapter`` gives them.
        tensors: Its tensors, likewise.
        architecture: The base's.

    Returns:
        The settings for the layout, tensors and settings of the adapter, and the start that is
        taken from the base, if it is one.
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
    """The settings that a base is laid out with to take an adapter of a file.

    Args:
        stored: The adapter's own settings.
        tensors: Its tensors.
        architecture: The base's.
    """
    adapted = {layer.module for layer in adapted_layers(tensors)}
    config = lora_config(stored, adapted, architecture.experts)
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
    every = [*architecture.every_linear, ends.head_layer, ends.embedding_layer]
    known = known_targets(config.target_modules, every, architecture.experts)
    return config.model_copy(update={"target_modules": known})


def read_vector(device: Device, tensor: Tensor) -> npt.NDArray[Any]:
    """A vector's values, float32 unless they are words; waits for the device."""
    assert tensor.storage is not None
    if tensor.storage.on_host is not None:
        return tensor.storage.on_host.copy()
    allocate(device, tensor.storage)
    of_words, size = tensor.dtype == "uint32", ITEM_SIZE[tensor.dtype]
    values = np.empty(tensor.nbytes // size, np.uint32 if of_words else np.float32)
    for begin in range(0, tensor.nbytes, UPLOAD_CHUNK):  # what it passes through is as large
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


def read_flat(device: Device, flat: Tensor | Pieces) -> npt.NDArray[Any]:
    """The values of a vector that may be in pieces, as ``read_vector`` gives them."""
    pieces = in_pieces(flat)
    if len(pieces.pieces) == 1:
        return read_vector(device, pieces.whole)
    dtype = np.uint32 if flat.dtype == "uint32" else np.float32
    values = np.empty(sum(piece.columns for piece in pieces.pieces), dtype)
    for begin, piece in pieces.numbered():
        values[begin : begin + piece.columns] = read_vector(device, piece)
    return values


def write_flat(device: Device, flat: Tensor | Pieces, values: npt.NDArray[Any]) -> None:
    """Overwrites a vector that may be in pieces."""
    pieces = in_pieces(flat)
    if len(pieces.pieces) == 1:
        write_vector(device, pieces.whole, values)
        return
    for begin, piece in pieces.numbered():
        write_vector(device, piece, values[begin : begin + piece.columns])


def neutral_parameters(layout: ModelLayout, programs: Programs, device: Device) -> FloatArray:
    """A flat adapter that does nothing.

    Zeros, but the base's own rows of tokens, and with DoRA the norms of the base's rows. One that
    began as a part of the base does nothing as it began. A device that does not compute leaves the
    norms to whoever does, by ``norms_graph``.
    """
    adapter = layout.adapter
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
        graph, norms = norms_graph(layout, name)
        program = programs.from_graph(graph, (norms,))
        program.run()
        first = adapter.place(name, MAGNITUDE).offset
        flat[first : first + norms.columns] = np.frombuffer(program.read(norms), np.float32)
    return flat


def norms_graph(layout: ModelLayout, name: str) -> tuple[Graph, Tensor]:
    """The norms of the rows of a base's layer."""
    weight, graph = layout.network.modules.linears[name].weight, layout.new_graph()
    norms = graph.float_vector("norms", weight.rows)
    for row0, w in weight.shards(graph):
        dora.norm(graph, w, layout.adapter.loras[name], norms, row0, 0.0, plain=True)
    return graph, norms


def read_fitting(
    folder: str | PathLike[str],
    adapter: Adapter,
    architecture: Architecture,
    base: str | PathLike[str],
) -> tuple[Mapping[str, FloatArray], Mapping[str, FloatArray]]:
    """An adapter's file for an adapter that is laid out; no weight of the base is needed.

    Args:
        folder: The folder of the file.
        adapter: What takes it.
        architecture: The base's.
        base: The base's name or folder.

    Returns:
        The flat vector's tensors, and the biases by their modules.

    Raises:
        CheckpointError: If it is damaged or does not fit.
    """
    read, config = load_adapter(Path(folder), biases=True, stacking=architecture.stacking)
    tensors, stored = read_started(folder, read, config, adapter)
    shapes = adapter_shapes(architecture, stored)
    routers = architecture.routers
    refuse_other_base(folder, stored, tensors, shapes, base, whole=False, routers=routers)
    check_scaling(stored, adapter, folder)
    return split_biases(tensors)


def check_scaling(stored: AdapterConfig, adapter: Adapter, path: str | PathLike[str]) -> None:
    """Refuses an adapter that would be scaled otherwise than it was trained.

    Raises:
        CheckpointError: If its rank or scaling is not the model's.
    """
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
    adapter: Adapter,
) -> tuple[Mapping[str, FloatArray], AdapterConfig]:
    """An adapter's file for an adapter that may have begun as a part of its base.

    Args:
        folder: Its folder.
        tensors: Its tensors.
        stored: Its settings.
        adapter: What takes it.

    Raises:
        CheckpointError: If the base was changed for another start.
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
    """Warns whoever loads an adapter whose run quantized the base otherwise."""
    if text := trained_otherwise(adapter, quant):
        warnings.warn(text, stacklevel=4)


def trained_otherwise(adapter: str | PathLike[str], quant: QuantConfig) -> str | None:
    """A sentence where an adapter's run quantized the base otherwise, by its config.yaml.

    Who opens a base without quantization has asked for it.
    """
    run = find_run(adapter)
    if run is None or quant.scheme == "none":
        return None
    try:
        trained = load_config(run / "config.yaml").quant
    except ConfigError:
        return None  # the run's own file is damaged: nothing is known
    own = quant.model_dump()
    other = [f"{key} = {v}" for key, v in trained.model_dump().items() if v != own[key]]
    if not other:
        return None
    return (
        f"{adapter} was trained on a base quantized with {', '.join(other)}, which this model was "
        "not opened with: qlora_wgpu.open_adapter opens it as it was trained"
    )
