"""Trained rows of an adapter by the tensors of a base's files that they go into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.lora import AdapterConfig
from qlora_wgpu.lora.peft_files import StoredRows, stored_rows
from qlora_wgpu.lora.peft_names import WHOLE, Float32Array, adapted_layers, of_kind
from qlora_wgpu.lora.targets import saved_modules
from qlora_wgpu.lora.trained_tokens import Vocabulary, check_ends
from qlora_wgpu.model.adapter_state import config_of
from qlora_wgpu.model.checkpoint_reader import stored_name
from qlora_wgpu.model.pretrained import has_own_head


def check_vocabulary(
    folder: ModelFolder,
    architecture: Architecture,
    tensors: Mapping[str, Float32Array],
    config: AdapterConfig,
) -> None:
    """Makes sure that what an adapter trained of embedding and head goes into the base's.

    Args:
        folder: The base.
        architecture: What its config.json describes.
        tensors: The adapter's, by PEFT's names.
        config: The adapter's settings.

    Raises:
        ConfigError: If it trained anything else whole, or what is tied as PEFT alone computes it.
    """
    vocabulary = Vocabulary.of(architecture)
    adapted = {layer.module for layer in adapted_layers(tensors)}
    has_pair = not adapted.isdisjoint((vocabulary.embedding, vocabulary.head))
    if not (has_pair or config.modules_to_save or config.trainable_token_indices):
        return
    if vocabulary.tied and has_own_head(folder, architecture):
        vocabulary = replace(vocabulary, tied=False)
    own = config_of(config, tensors, architecture)
    saved_modules(own, vocabulary)
    rows = vocabulary.trained(own.trainable_token_indices)
    check_ends(own, vocabulary, adapted, trains_rows=bool(rows))


def trained_rows_by_name(
    folder: ModelFolder,
    architecture: Architecture,
    tensors: Mapping[str, Float32Array],
    config: AdapterConfig,
) -> dict[str, StoredRows]:
    """The rows by stored names; those of a matrix that files hold twice, as tied ones may, twice.

    Args:
        folder: The base.
        architecture: What its config.json describes.
        tensors: The adapter's, by PEFT's names.
        config: The adapter's settings.

    Raises:
        CheckpointError: If the base has no such row.
    """
    rows = {f"{each.module}.weight": each for each in stored_rows(tensors, config)}
    for each in rows.values():
        if max(each.indices) >= architecture.vocab_size:
            raise CheckpointError(
                f"the adapter trained token {max(each.indices)}, but {folder.path} has "
                f"{architecture.vocab_size:,} tokens: merge it into the model that it was trained "
                "on"
            )
    embedding, head = architecture.embed_name, architecture.head_name
    is_tied = architecture.tied and not has_own_head(folder, architecture)
    if is_tied and (shared := rows.get(embedding) or rows.get(head)) is not None:
        rows = {embedding: shared, head: shared}
    by_name = {stored_name(folder, architecture, name): each for name, each in rows.items()}
    return {name: each for name, each in by_name.items() if folder.has(name)}


def wholes_by_name(
    folder: ModelFolder, architecture: Architecture, tensors: Mapping[str, Float32Array]
) -> dict[str, Float32Array]:
    """Matrices that were trained whole, by the stored names of those that they replace.

    A tied one that files hold twice is there twice.

    Args:
        folder: The base.
        architecture: What its config.json describes.
        tensors: The adapter's, by PEFT's names.
    """
    found = {f"{module}.weight": array for module, array in of_kind(tensors, WHOLE).items()}
    ends = architecture.embed_name, architecture.head_name
    if architecture.tied and found and not has_own_head(folder, architecture):
        found = dict.fromkeys(ends, next(iter(found.values())))
    by_name = {stored_name(folder, architecture, name): each for name, each in found.items()}
    return {name: array for name, array in by_name.items() if folder.has(name)}
