"""A PEFT adapter as a LoRA adapter of llama.cpp, in GGUF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.export.gguf.architectures import find_llama_cpp, model_type_of
from qlora_wgpu.export.gguf.parts import LayerParts
from qlora_wgpu.families.family import ExpertSpec, find_family
from qlora_wgpu.lora import AdapterConfig, load_adapter
from qlora_wgpu.lora.names import AdaptedLayer, adapted_layers

FloatArray = npt.NDArray[np.float32]
Pair = tuple[FloatArray, FloatArray]


def export_gguf(
    model: str | PathLike[str], adapter: str | PathLike[str], out: str | PathLike[str]
) -> int:
    """Writes an adapter that llama.cpp loads with ``--lora`` beside the base model's GGUF.

    Args:
        model: Folder or hub name of the base; its config.json alone is read.
        adapter: Folder of the PEFT adapter.
        out: The .gguf file.

    Returns:
        How many layers it adapts, each expert's counted.

    Raises:
        CheckpointError: If a file is missing, damaged or cannot be written.
        UnsupportedModelError: If llama.cpp's names for this model are not known here.
    """
    import gguf  # takes its time, for those alone who need it

    config = ModelFolder.without_weights(model).config
    architecture = find_family(config).read(config)
    llama_cpp = find_llama_cpp(
        model_type_of(config), "adapters", has_experts=bool(architecture.experts)
    )
    parts = LayerParts(architecture, llama_cpp)
    arch = gguf.MODEL_ARCH[llama_cpp.label]
    names = gguf.get_tensor_name_map(arch, architecture.num_layers)
    tensors, peft = load_adapter(adapter, in_turns=architecture.in_turns)
    if peft.use_dora:
        raise UnsupportedModelError(
            f"{adapter} is a DoRA adapter, which llama.cpp cannot apply: merge it instead"
        )
    if peft.trainable_token_indices:
        raise UnsupportedModelError(
            f"{adapter} has trained rows of the embedding (trainable_token_indices), which "
            "llama.cpp's adapters have not: merge it, or export the whole model"
        )
    if peft.modules_to_save:
        raise UnsupportedModelError(
            f"{adapter} has a whole {peft.modules_to_save[0]} (modules_to_save), which llama.cpp's "
            "adapters have not: merge it, or export the whole model"
        )
    tensors_of = {layer.module for layer in adapted_layers(tensors)}
    embedding = architecture.embed_name.removesuffix(".weight")
    if embedding in tensors_of:
        raise UnsupportedModelError(
            f"{adapter} adapts {embedding}, of which llama.cpp's adapters are not written here: "
            "merge the adapter, or export the whole model"
        )
    if architecture.head.name in tensors_of and architecture.tied:
        raise UnsupportedModelError(
            f"{adapter} adapts {architecture.head.name}, which is the embedding in this base's "
            "GGUF, so that llama.cpp would not find it: merge the adapter, or export the whole "
            "model"
        )
    path = Path(out)
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(peft.lora_alpha))
    pairs = {layer.module: _scaled(layer, peft) for layer in adapted_layers(tensors)}
    count = len(pairs)
    stacked = _stacked(pairs, architecture.experts)
    for module, (a, b) in stacked.items():
        for part in parts.of(module, b.shape[-2]):
            plain = part.module.replace(".language_model.", ".")
            gguf_name = names.get_name(f"{plain}.weight", try_suffixes=(".weight",))
            if gguf_name is None:
                raise UnsupportedModelError(f"llama.cpp has no name for {part.module}")
            a_part, b_part = part.by_columns(a), part.by_rows(b)
            writer.add_tensor(f"{gguf_name}.lora_a", np.ascontiguousarray(a_part))
            writer.add_tensor(f"{gguf_name}.lora_b", np.ascontiguousarray(b_part))
    _write(writer, path)
    return count


def _scaled(layer: AdaptedLayer, peft: AdapterConfig) -> Pair:
    """A and B: llama.cpp multiplies by alpha / rank; whatever else the scaling is goes into B."""
    ratio = peft.scaling_of(layer.module) * len(layer.a) / peft.lora_alpha
    b = layer.b if ratio == 1.0 else (layer.b * np.float32(ratio)).astype(np.float32)
    return layer.a, b


def _stacked(pairs: Mapping[str, Pair], experts: Sequence[ExpertSpec]) -> dict[str, Pair]:
    """The pairs with those of a layer's experts in one: llama.cpp has all experts in one tensor.

    Raises:
        UnsupportedModelError: If some of a layer's experts have none, or another rank.
    """
    stacked = dict(pairs)
    for stack in experts:
        own = [stacked.pop(spec.name, None) for spec in stack.linears]
        present = [pair for pair in own if pair is not None]
        if not present:
            continue
        if len(present) < len(own) or len({len(a) for a, _ in present}) > 1:
            raise UnsupportedModelError(
                f"llama.cpp adapts all experts of a layer, and with one rank: {stack.name} has "
                f"{len(present)} of {len(own)}; merge the adapter instead"
            )
        a, b = zip(*present, strict=True)
        stacked[stack.name] = np.stack(a), np.stack(b)
    return stacked


def _write(writer: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer.write_header_to_file(path=path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    except OSError as err:
        raise CheckpointError(f"{path} cannot be written: {err.strerror or err}") from err
