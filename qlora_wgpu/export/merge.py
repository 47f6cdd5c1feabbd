"""An adapter merged into its base model: W + scaling · B·A, in the base's own element type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.safetensors_format import FLOATS
from qlora_wgpu.checkpoint.stream import Entry
from qlora_wgpu.config import QuantConfig, load_config
from qlora_wgpu.config.as_trained import find_run
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.export.folders import Tensors, as_dtype, without, write_folder
from qlora_wgpu.families.family import Architecture, find_family
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.biases import split_biases
from qlora_wgpu.lora.fitting import adapter_shapes, refuse_other_base
from qlora_wgpu.lora.names import adapted_layers
from qlora_wgpu.model.weights import stored_name
from qlora_wgpu.quant import quantize_nf4

Base = Literal["original", "dequantized"]
FloatArray = npt.NDArray[np.float32]


def merge(
    model: str | PathLike[str],
    adapter: str | PathLike[str],
    out: str | PathLike[str],
    *,
    base: Base = "original",
    quant: QuantConfig | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> None:
    """Writes a merged model that transformers loads, one tensor in memory at a time.

    It has the tokenizer and the chat template that are kept beside the adapter, if there are any.

    Args:
        model: Folder or hub name of the base.
        adapter: Folder of the PEFT adapter.
        out: The new folder.
        base: Weights to add the adapter to: the stored 16-bit weights, or what they are after
            quantization, which the adapter was trained with.
        quant: How they were quantized, for "dequantized"; by default as the config.yaml of the
            adapter's run says, or with ``QuantConfig``'s defaults where it belongs to none.
        progress: Called with each tensor's name before it is written.

    Raises:
        CheckpointError: If a file is missing or damaged, or the adapter does not fit.
        UnsupportedModelError: If the base is stored quantized and its original weights are wanted.
        ConfigError: If ``out`` is there already.
    """
    folder = ModelFolder.open(model)
    if folder.parts_stacks:
        raise UnsupportedModelError(
            f"{model}: transformers reads the experts of a layer together, which are by themselves "
            "here: merge into the model's safetensors version"
        )
    architecture = find_family(folder.config).read(folder.config)
    tensors, config = load_adapter(adapter, biases=True)
    linears = {
        stored_name(folder, architecture, f"{s.name}.weight"): s for s in architecture.every_linear
    }
    shapes = adapter_shapes(architecture.every_linear, config)
    refuse_other_base(adapter, config, tensors, shapes, model, whole=False)
    modules = {spec.name: name for name, spec in linears.items()}
    pairs: dict[str, tuple[FloatArray, FloatArray, float, FloatArray | None]] = {}
    for layer in adapted_layers(tensors):
        scaling = config.scaling_of(layer.module)
        pairs[modules[layer.module]] = (layer.a, layer.b, scaling, layer.magnitude)
    biases = _biases(folder, architecture, tensors, adapter)
    settings = quant or _quant_of(adapter)
    # What a quantized folder keeps as floats was not quantized in training either.
    quantizes = base == "dequantized" and settings.scheme == "nf4" and not folder.is_quantized

    def tensors_of(tensor: str) -> Tensors:
        if folder.is_companion(tensor):
            return {}
        name = folder.weight_of(tensor)
        parts = folder.parts_of(name)
        is_packed = bool(parts) and folder.holds_quantized(parts[0])
        if parts and (quantizes or is_packed or any(part in pairs for part in parts)):
            if is_packed:
                check_base()
            stack, shape = folder.whole_stack(name)
            entry = Entry(folder.float_dtype(parts[0]), shape)
            return {stack: (entry, lambda: merged_stack(name, parts))}
        if name in biases:
            entry = Entry(folder.dtype(name), folder.shape(name))
            return {name: (entry, lambda: as_dtype(biases[name], entry.dtype))}
        is_quantized = folder.holds_quantized(name)
        if not is_quantized and name not in pairs and not (quantizes and name in linears):
            return {name: (Entry(folder.dtype(name), folder.shape(name)), lambda: folder.raw(name))}
        if is_quantized:
            check_base()
        dtype = folder.float_dtype(name)
        if dtype not in FLOATS:
            raise UnsupportedModelError(f"{model}: {name} is stored as {dtype}, not as floats")
        entry = Entry(dtype, folder.weight_shape(name))
        return {name: (entry, lambda: as_dtype(merged(name), dtype))}

    def check_base() -> None:
        if base == "original":
            raise UnsupportedModelError(
                f"{model} is stored quantized, so its original weights are not known: merge into "
                "the dequantized ones (--base dequantized), or into the unquantized model"
            )

    def merged(name: str) -> FloatArray:
        stored = folder.quantized(name)
        weight = stored.dequantize() if stored is not None else folder.float32(name)
        if stored is None and (quantizes or folder.must_requantize(name)):
            weight = quantize_nf4(weight, settings.blocksize, settings.double_quant).dequantize()
        if name not in pairs:
            return weight
        a, b, scaling, magnitude = pairs[name]
        weight += np.float32(scaling) * (b @ a)
        if magnitude is not None:
            weight *= (magnitude / np.linalg.norm(weight, axis=1))[:, None]
        return weight

    def merged_stack(name: str, parts: list[str]) -> npt.NDArray[Any]:
        dtype = folder.float_dtype(parts[0])
        return folder.joined(name, [as_dtype(merged(part), dtype) for part in parts])

    config_json: dict[str, Any] = without(folder.config, ["quantization_config"])
    write_folder(folder, Path(out), config_json, tensors_of, progress, adapter=adapter)


def _biases(
    folder: ModelFolder,
    architecture: Architecture,
    tensors: Mapping[str, FloatArray],
    adapter: str | PathLike[str],
) -> dict[str, FloatArray]:
    """The biases that were trained beside the adapter, by the names of those that they replace.

    Raises:
        CheckpointError: If the base has no such bias.
    """
    _, trained = split_biases(tensors)
    biases = {stored_name(folder, architecture, f"{m}.bias"): a for m, a in trained.items()}
    for name, array in biases.items():
        if not folder.has(name) or folder.shape(name) != array.shape:
            raise CheckpointError(
                f"{adapter} has a trained {name} of {array.size} numbers, which {folder.path} has "
                "not: merge it into the model that it was trained on"
            )
    return biases


def _quant_of(adapter: str | PathLike[str]) -> QuantConfig:
    run = find_run(adapter)
    return QuantConfig() if run is None else load_config(run / "config.yaml").quant
