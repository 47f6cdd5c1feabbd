"""Small GGUF files, written by gguf's writer as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from e2e.tiny import weights
from gguf import GGMLQuantizationType as Type

from qlora_wgpu.families.family import find_family
from support.tiny_tokenizer import SPECIAL

# By config.json's model_type: llama.cpp's name, whether q and k are permuted, what norms are
# stored with, and further keys.
_ARCHITECTURES = {
    "llama": ("llama", True, 0, {}),
    "mistral": ("llama", True, 0, {"sliding_window": "attention.sliding_window"}),
    "mixtral": ("llama", True, 0, {"num_local_experts": "expert_count",
                                   "num_experts_per_tok": "expert_used_count"}),
    "qwen2": ("qwen2", False, 0, {}),
    "qwen3": ("qwen3", False, 0, {}),
    "qwen3_moe": ("qwen3moe", False, 0, {
        "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length"}),
    "gemma": ("gemma", False, 1, {}),
    "gemma2": ("gemma2", False, 1, {
        "sliding_window": "attention.sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping"}),
    "gemma3_text": ("gemma3", False, 1, {
        "sliding_window": "attention.sliding_window",
        "rope_local_base_freq": "rope.freq_base_swa"}),
    "phi3": ("phi3", False, 0, {
        "sliding_window": "attention.sliding_window",
        "original_max_position_embeddings": "rope.scaling.original_context_length"}),
    "granite": ("granite", True, 0, {
        "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}),
    "olmo2": ("olmo2", False, 0, {}),
    "smollm3": ("smollm3", True, 0, {}),
    "gpt_oss": ("gpt-oss", False, 0, {
        "sliding_window": "attention.sliding_window", "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "intermediate_size": "expert_feed_forward_length"}),
}  # fmt: skip
_KEYS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
}  # fmt: skip
_STACKED = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up",
            "down_proj": "down", "w2": "down"}  # fmt: skip


def random_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """A model's weights, its routers' and tables' too."""
    architecture = find_family(config).read(config)
    shapes = {**architecture.router_shapes, **architecture.tables}
    rng = np.random.default_rng(1)
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return weights(config) | drawn


def byte_vocabulary(template: str | None = None) -> dict[str, Any]:
    """The keys of a byte-level vocabulary, in which every byte is a token."""
    from tokenizers import pre_tokenizers

    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }
    return keys if template is None else {**keys, "tokenizer.chat_template": template}


def keys_of(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for a config.json."""
    name, _, _, more = _ARCHITECTURES[config["model_type"]]
    both = [*_KEYS.items(), *more.items()]
    keys = {f"{name}.{key}": config[hf] for hf, key in both if hf in config}
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    share = config.get("partial_rotary_factor", 1.0)
    keys |= {f"{name}.attention.{part}_length": head_dim for part in ("key", "value")}
    return {**keys, f"{name}.rope.dimension_count": int(head_dim * share)}


def tensors_of(config: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A model's weights by llama.cpp's names, changed as its converter changes them."""
    name, pairs, offset, _ = _ARCHITECTURES[config["model_type"]]
    arch = next(a for a, label in gguf.MODEL_ARCH_NAMES.items() if label == name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for hf, array in weights.items():
        module, _, leaf = hf.rpartition(".")
        if ".experts." in module:
            block, part = module.split(".")[2], _STACKED[module.rpartition(".")[2]]
            stacks.setdefault(f"blk.{block}.ffn_{part}_exps.{leaf}", []).append(array)
            continue
        if pairs and module.rpartition(".")[2] in heads:
            count = heads[module.rpartition(".")[2]]
            halves = array.reshape(count, 2, len(array) // count // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if offset and module.endswith("norm"):
            array = array + np.float32(offset)
        if leaf == "sinks":
            module, leaf = hf, "weight"
        tensors[f"{names.get_name(module)}.{leaf}"] = array
    return tensors | {stored: np.stack(parts) for stored, parts in stacks.items()}


def write_gguf(
    path: Path,
    architecture: str,
    keys: dict[str, Any],
    tensors: dict[str, np.ndarray],
    types: dict[str, Type] | None = None,
    default: Type | None = None,
) -> Path:
    """Writes a file.

    Args:
        path: The file.
        architecture: ``general.architecture``.
        keys: Metadata by key.
        tensors: float32 arrays by llama.cpp's names.
        types: What they are stored as, by their names or endings of these.
        default: The type of the other matrices; float32 where it is not given.
    """
    writer = gguf.GGUFWriter(None, architecture)
    for key, value in keys.items():
        add_key(writer, key, value)
    for name, array in tensors.items():
        kind = next((t for end, t in (types or {}).items() if name.endswith(end)), default)
        if kind is None or array.ndim < 2:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file(path=path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a value of the type that llama.cpp's converter has for it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def write_model(
    path: Path, config: dict[str, Any], weights: dict[str, np.ndarray], **more: Any
) -> Path:
    """A model in one file: ``keys`` in ``more`` are beside those of its config.json."""
    keys = keys_of(config) | more.pop("keys", {})
    tensors = tensors_of(config, weights) | more.pop("tensors", {})
    return write_gguf(path, _ARCHITECTURES[config["model_type"]][0], keys, tensors, **more)
