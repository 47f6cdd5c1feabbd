"""What config.json would say of a GGUF file, by its keys."""

from __future__ import annotations

from typing import Any

from qlora_wgpu.checkpoint.gguf.architecture import GGUFArchitecture
from qlora_wgpu.checkpoint.gguf.architectures import ARCHITECTURES
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.checkpoint.gguf.rope import read_rope
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError

Config = dict[str, Any]
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def read_config(file: GGUFFile) -> Config:
    """What the model's config.json says.

    Raises:
        CheckpointError: If a key is missing or wrong.
        UnsupportedModelError: If the architecture, or one of its keys, is not computed.
    """
    keys = Keys(file.metadata, file.path)
    architecture = find_architecture(keys)
    config = _common(keys, file, architecture)
    config |= architecture.more(keys, file, config)
    config = {"model_type": architecture.model_type, **config}
    config.setdefault("architectures", [architecture.causal_class])
    keys.refuse_the_rest()
    return config


def find_architecture(keys: Keys) -> GGUFArchitecture:
    """The architecture that a file names.

    Raises:
        UnsupportedModelError: If it is none that is computed.
    """
    if keys.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{keys.where} has the architecture {keys.architecture[:80]!r}, of which GGUF files "
            f"are not read (read: {', '.join(sorted(ARCHITECTURES))}): take the model's "
            "safetensors version"
        )
    return ARCHITECTURES[keys.architecture]


def _common(keys: Keys, file: GGUFFile, architecture: GGUFArchitecture) -> Config:
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    if not 0 < heads <= hidden:
        raise CheckpointError(
            f"{file.path}: {keys.architecture}.attention.head_count is {heads}, but "
            f"embedding_length is {hidden}"
        )
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if not architecture.own_sizes:
        keys.refuse("attention.value_length", head_dim)
    keys.refuse("attention.causal", True)
    keys.ignore("vocab_size")  # the embedding tells
    config = {
        "vocab_size": file.tensor(EMBEDDING).place.shape[0],
        "hidden_size": hidden,
        "intermediate_size": 0 if architecture.own_sizes else keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_heads(keys, heads, architecture),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        architecture.epsilon[1]: keys.number(architecture.epsilon[0]),
        "tie_word_embeddings": HEAD not in file,
        **_token_ids(file),
    }
    return config | read_rope(keys, file, head_dim)


def _key_heads(keys: Keys, heads: int, architecture: GGUFArchitecture) -> int:
    """Heads of keys, of the layers that attend."""
    if architecture.own_sizes:
        return 0
    if not architecture.some_attend:
        count: int = keys.integer("attention.head_count_kv", heads)
        return count
    counts = set(keys.each("attention.head_count_kv", keys.integer("block_count"))) - {0}
    if len(counts) != 1:
        raise CheckpointError(
            f"{keys.where}: {keys.architecture}.attention.head_count_kv must have one number "
            f"beside 0, got {sorted(counts)}"
        )
    return int(counts.pop())


def _token_ids(file: GGUFFile) -> Config:
    ids = {name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {f"{name}_token_id": value for name, value in ids.items() if type(value) is int}
