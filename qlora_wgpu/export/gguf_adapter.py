"""A PEFT adapter as a LoRA adapter of llama.cpp, in GGUF."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CheckpointError, ConfigError, UnsupportedModelError
from qlora_wgpu.families.family import ExpertSpec, find_family
from qlora_wgpu.lora import AdapterConfig, load_adapter
from qlora_wgpu.lora.names import AdaptedLayer, adapted_layers

# llama.cpp's architectures by model type, and whether q and k are stored for neighbouring pairs
# of a rotation instead of halves.
_ARCHITECTURES = {
    "llama": ("LLAMA", True),
    "mistral": ("LLAMA", True),
    "mixtral": ("LLAMA", True),
    "granite": ("GRANITE", True),
    "smollm3": ("SMOLLM3", True),
    "qwen2": ("QWEN2", False),
    "qwen3": ("QWEN3", False),
    "qwen2_moe": ("QWEN2MOE", False),
    "qwen3_moe": ("QWEN3MOE", False),
    "gemma": ("GEMMA", False),
    "gemma2": ("GEMMA2", False),
    "gemma3_text": ("GEMMA3", False),
    "phi3": ("PHI3", False),
    "olmo2": ("OLMO2", False),
    "starcoder2": ("STARCODER2", False),
    "stablelm": ("STABLELM", False),
    "cohere": ("COMMAND_R", False),
    "cohere2": ("COHERE2", False),
    "exaone4": ("EXAONE4", False),
    "ernie4_5": ("ERNIE4_5", False),
    "seed_oss": ("SEED_OSS", False),
    "hunyuan_v1_dense": ("HUNYUAN_DENSE", False),
    "ministral3": ("MISTRAL3", True),
    "mistral3": ("MISTRAL3", True),
    "arcee": ("ARCEE", True),
    "nemotron": ("NEMOTRON", False),
    "apertus": ("APERTUS", False),
    "lfm2": ("LFM2", False),
    "granitemoehybrid": ("GRANITE", True),  # where it is dense, as all that are read here
}
# What one layer here is two of llama.cpp's, or is called otherwise there.
_PARTS = {
    "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
    "shared_mlp.output_linear": ("mlp.down_proj",),
}
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
        ConfigError: If the extra ``gguf`` is not installed.
        CheckpointError: If a file is missing, damaged or cannot be written.
        UnsupportedModelError: If llama.cpp's names for this model are not known here.
    """
    try:
        gguf = importlib.import_module("gguf")
    except ImportError:
        raise ConfigError("GGUF files need the extra: pip install 'qlora-wgpu[gguf]'") from None
    config = ModelFolder.without_weights(model).config
    model_type = str(config.get("model_type"))
    if model_type not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"adapters of model type {model_type!r} are not exported to GGUF (known: "
            f"{', '.join(sorted(_ARCHITECTURES))})"
        )
    label, permuted = _ARCHITECTURES[model_type]
    arch = gguf.MODEL_ARCH[label]
    architecture = find_family(config).read(config)
    names = gguf.get_tensor_name_map(arch, architecture.num_layers)
    text = config.get("text_config") or config
    heads = {
        "q_proj": int(text["num_attention_heads"]),
        "k_proj": int(text.get("num_key_value_heads") or text["num_attention_heads"]),
    }
    tensors, peft = load_adapter(adapter)
    if peft.use_dora:
        raise UnsupportedModelError(
            f"{adapter} is a DoRA adapter, which llama.cpp cannot apply: merge it instead"
        )
    path = Path(out)
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(peft.lora_alpha))
    pairs = {layer.module: _scaled(layer, peft) for layer in adapted_layers(tensors)}
    count = len(pairs)
    for module, (a, b) in _parts(_stacked(pairs, architecture.experts)).items():
        gguf_name = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        if gguf_name is None:
            raise UnsupportedModelError(f"llama.cpp has no name for {module}")
        leaf = module.rpartition(".")[2]
        if permuted and leaf in heads:
            b = _to_pairs(b, heads[leaf])
        writer.add_tensor(f"{gguf_name}.lora_a", np.ascontiguousarray(a))
        writer.add_tensor(f"{gguf_name}.lora_b", np.ascontiguousarray(b))
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


def _parts(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """The pairs by names that llama.cpp knows, each as many as there are tensors for it there."""
    parts: dict[str, Pair] = {}
    for module, (a, b) in pairs.items():
        name = module.replace(".language_model.", ".")
        own = next((leaf for leaf in _PARTS if name.endswith(leaf)), None)
        if own is None:
            parts[name] = a, b
            continue
        leaves = _PARTS[own]
        for leaf, rows in zip(leaves, np.split(b, len(leaves)), strict=True):
            parts[name.removesuffix(own) + leaf] = a, rows
    return parts


def _to_pairs(b: FloatArray, heads: int) -> FloatArray:
    """Rows of each head from halves that rotate together to neighbours."""
    rows, r = b.shape
    halves = b.reshape(heads, 2, rows // heads // 2, r)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, r)


def _write(writer: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer.write_header_to_file(path=path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    except OSError as err:
        raise CheckpointError(f"{path} cannot be written: {err.strerror or err}") from err
