"""An adapter merged into its base model: W + scaling · B·A, in the base's own element type."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.safetensors_format import FLOATS
from qlora_wgpu.checkpoint.stream import Entry
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.export.folders import Tensors, as_dtype, without, write_folder
from qlora_wgpu.export.merged_weights import Base, MergedWeights


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
    if ModelFolder.without_weights(model).parts_stacks:
        raise UnsupportedModelError(
            f"{model}: transformers reads the experts of a layer together, which are by themselves "
            "here: merge into the model's safetensors version"
        )
    merged = MergedWeights(model, adapter, base, quant)
    folder = merged.folder

    def tensors_of(tensor: str) -> Tensors:
        if folder.is_companion(tensor):
            return {}
        name = folder.weight_of(tensor)
        parts = folder.parts_of(name)
        if parts and not all(map(merged.is_as_stored, parts)):
            stack, shape = folder.whole_stack(name)
            entry = Entry(folder.float_dtype(parts[0]), shape)
            return {stack: (entry, lambda: merged_stack(name, parts))}
        if merged.besides(name):
            return {each: floats(each, folder.float_dtype(name)) for each in ends_of(name)}
        if merged.is_as_stored(name):
            return {name: (Entry(folder.dtype(name), folder.shape(name)), lambda: folder.raw(name))}
        dtype = folder.float_dtype(name)
        if dtype not in FLOATS:
            raise UnsupportedModelError(f"{model}: {name} is stored as {dtype}, not as floats")
        return {name: floats(name, dtype)}

    def ends_of(name: str) -> list[str]:
        return [name, *merged.besides(name)]

    def floats(name: str, dtype: str) -> tuple[Entry, Callable[[], npt.NDArray[Any]]]:
        return Entry(dtype, merged.shape(name)), lambda: as_dtype(merged.float32(name), dtype)

    def merged_stack(name: str, parts: list[str]) -> npt.NDArray[Any]:
        dtype = folder.float_dtype(parts[0])
        return folder.joined(name, [as_dtype(merged.float32(part), dtype) for part in parts])

    config_json: dict[str, Any] = without(merged.config(), ["quantization_config"])
    write_folder(folder, Path(out), config_json, tensors_of, progress, adapter=adapter)
