"""Names of a model's tensors in its files, where they differ from the modules'."""

from __future__ import annotations

from collections.abc import Sequence

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.families.family import Architecture


def stored_name(folder: ModelFolder, architecture: Architecture, name: str) -> str:
    """The name of a model's tensor in its files."""
    return with_prefixes(folder, architecture.stored_prefixes, name)


def with_prefixes(folder: ModelFolder, prefixes: Sequence[tuple[str, str]], name: str) -> str:
    """The name as it is, or with the beginning that its files have instead."""
    if not folder.has(name):
        for own, other in prefixes:
            if name.startswith(own) and folder.has(other + name.removeprefix(own)):
                return other + name.removeprefix(own)
    return name


def stored_embedding(folder: ModelFolder | None, architecture: Architecture) -> str:
    """The embedding's tensor: a tied matrix may be stored as the head, another may not.

    Raises:
        CheckpointError: If there is one of the two only, and config.json does not tie them.
    """
    name, head_name = architecture.embed_name, architecture.head_name
    if folder is None:
        return name
    has_head = folder.has(stored_name(folder, architecture, head_name))
    if folder.has(stored_name(folder, architecture, name)):
        if not has_head and not architecture.tied:
            raise CheckpointError(
                f"{folder.path}: the weights have no tensor {head_name!r}, and {name} is not "
                "taken for it, because config.json does not say tie_word_embeddings = true"
            )
        return name
    if not has_head:
        return name
    if not architecture.tied:
        raise CheckpointError(
            f"{folder.path}: the weights lack {name}, and {head_name} is not taken for "
            "it, because config.json does not say tie_word_embeddings = true"
        )
    return head_name
