"""A config.json from a GGUF file's keys, and a GGUF file's keys from a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.families.parts.config import ConfigReader
from qlora_wgpu.families.parts.decoder import Decoder
from qlora_wgpu.families.parts.norm import LayerNorm
from qlora_wgpu.gguf.architecture import (
    MTP_LAYERS,
    Config,
    GGUFArchitecture,
    Keys,
    ModelKeys,
    require_default_scale,
    window_keys,
)
from qlora_wgpu.gguf.architectures import find_architecture
from qlora_wgpu.gguf.gemma4 import rotation_factors
from qlora_wgpu.gguf.layout import EMBEDDING, HEAD
from qlora_wgpu.gguf.rotation import divisors, read_rope, rope_keys
from qlora_wgpu.ops.pointwise import ACTIVATIONS, ClampedGLU

# ---- reading -------------------------------------------------------------------------------------

_EPSILON = {True: "attention.layer_norm_epsilon", False: "attention.layer_norm_rms_epsilon"}


def read_config(file: GGUFFile) -> Config:
    """The contents of the model's config.json."""
    keys = Keys(file.metadata, file.path)
    architecture = find_architecture(keys)
    config = _common(keys, file, architecture)
    if architecture.rotated_share:
        rotated = keys.integer("rope.dimension_count", config["head_dim"])
        config[architecture.rotated_share] = rotated / config["head_dim"]
    elif not architecture.own_sizes:
        keys.require("rope.dimension_count", config["head_dim"])
    if architecture.default_scale:
        require_default_scale(keys, config)
    config |= {p.name: p.read(keys, config) for p in architecture.keys if p.name}
    config |= {name: tensor in file for name, tensor in architecture.flags.items()}
    config |= architecture.fixed
    for key, values in architecture.allowed.items():
        keys.require(key, *(v(config) if callable(v) else v for v in values))
    keys.ignore(*architecture.ignored)
    config |= architecture.read(keys, file, config)
    if architecture.mtp_layers:
        config["num_hidden_layers"] -= keys.integer(MTP_LAYERS, 0)
    config = {
        "model_type": architecture.model_types[0],
        "architectures": [architecture.causal_class],
        **config,
    }
    keys.refuse_unread()
    return config


def _common(keys: Keys, file: GGUFFile, architecture: GGUFArchitecture) -> Config:
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    if not 0 < heads <= hidden:
        raise CheckpointError(
            f"{file.path}: {keys.architecture}.attention.head_count is {heads}, but "
            f"embedding_length is {hidden}"
        )
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if not architecture.own_sizes:
        keys.require("attention.value_length", head_dim)
    keys.require("attention.causal", True)
    keys.ignore("vocab_size")  # the embedding's shape has it
    config = {
        "vocab_size": file.tensor(EMBEDDING).place.shape[0],
        "hidden_size": hidden,
        "intermediate_size": 0 if architecture.own_sizes else keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_heads(keys, heads, architecture),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        architecture.epsilon: keys.number(_EPSILON[architecture.layer_norm]),
        "tie_word_embeddings": HEAD not in file,
    }
    for name in ("bos_token_id", "eos_token_id"):
        token = file.metadata.get(f"tokenizer.ggml.{name}")
        if type(token) is int:
            config[name] = token
    return config | read_rope(keys, file, head_dim)


def _key_heads(keys: Keys, heads: int, architecture: GGUFArchitecture) -> int:
    if architecture.own_sizes:
        return 0
    if not architecture.hybrid:
        count: int = keys.integer("attention.head_count_kv", heads)
        return count
    counts = set(keys.each("attention.head_count_kv", keys.integer("block_count"))) - {0}
    if len(counts) != 1:
        raise CheckpointError(
            f"{keys.where}: {keys.architecture}.attention.head_count_kv must have exactly one "
            f"number other than 0, got {sorted(counts)}"
        )
    return int(counts.pop())


# ---- writing -------------------------------------------------------------------------------------


def model_keys(
    model_type: str, config: Mapping[str, Any], decoder: Decoder, architecture: GGUFArchitecture
) -> ModelKeys:
    """The keys of a model; what llama.cpp would compute differently is refused."""
    text = {**config, **(config.get("text_config") or {})}
    keys = ModelKeys(model_type, text, decoder, architecture)
    _sizes(keys)
    _check_parts(keys)
    if not architecture.own_sizes:
        rope_keys(keys)
        window_keys(keys)
    for write in architecture.write:
        write(keys)
    for pair in architecture.keys:
        pair.write(keys)
    return keys


def rope_tensors(keys: ModelKeys) -> dict[str, npt.NDArray[np.float32]]:
    """Divisors of each pair's frequency that no key describes, by their tensor's name."""
    return rotation_factors(keys) if keys.architecture.name == "gemma4" else divisors(keys)


def scalar_keys(merged: Any, llama_cpp: GGUFArchitecture) -> dict[str, Any]:
    """Keys that are an array with a number for each layer."""
    keys: dict[str, Any] = {}
    for key, leaf in llama_cpp.scalars:
        names = [f"model.layers.{i}.{leaf}" for i in range(merged.architecture.num_layers)]
        values = [merged.float32(merged.stored_name(name)).reshape(()) for name in names]
        keys[key] = np.array(values, np.float32)
    return keys


def _sizes(keys: ModelKeys) -> None:
    decoder, sizes = keys.decoder, keys.decoder.dimensions
    positions = ConfigReader(keys.config).optional_integer("max_position_embeddings")
    keys.values |= {
        "context_length": positions or 2048,
        "embedding_length": sizes.hidden_size,
        "block_count": len(decoder.layers),
        "feed_forward_length": sizes.intermediate_size,
        "attention.head_count": sizes.num_attention_heads,
        "attention.head_count_kv": sizes.num_key_value_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        _EPSILON[isinstance(decoder.norm, LayerNorm)]: float(decoder.norm.eps),
        "vocab_size": sizes.vocab_size,
    }


def _check_parts(keys: ModelKeys) -> None:
    """Refuses a model that differs from what its architecture fixes."""
    decoder, sizes, llama_cpp = keys.decoder, keys.decoder.dimensions, keys.architecture
    if llama_cpp.is_square and sizes.query_size != sizes.hidden_size:
        raise keys.unsupported(
            f"heads of a total width of {sizes.query_size}, not hidden_size, {sizes.hidden_size},"
        )
    if llama_cpp.head == "tied" and not decoder.tied:
        raise keys.unsupported("an untied head (tie_word_embeddings = false)")
    architecture = decoder.architecture()
    for spec in architecture.linears:
        if spec.bias and spec.name.rpartition(".")[2] not in llama_cpp.biases:
            raise keys.unsupported(f"a bias of {spec.name}")
    for layer in decoder.layers:
        activation = getattr(layer.mlp, "activation", llama_cpp.activation)
        if isinstance(activation, ClampedGLU):
            if activation != ClampedGLU():
                raise keys.unsupported("a swiglu_limit or swiglu_alpha other than gpt-oss's")
        elif activation in llama_cpp.approximates:
            note = f"llama.cpp approximates the activation {activation} by {llama_cpp.activation}"
            if note not in keys.notes:
                keys.notes.append(note)
        elif ACTIVATIONS.get(activation) != ACTIVATIONS.get(llama_cpp.activation):
            raise keys.unsupported(f"the activation {activation}")
