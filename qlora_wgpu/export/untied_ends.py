"""Embedding and head of a merged model that were one in the base, and are two with an adapter."""

from __future__ import annotations

from collections.abc import Collection

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.model.checkpoint_reader import stored_embedding, stored_name
from qlora_wgpu.model.pretrained import has_own_head


def untied_ends(
    folder: ModelFolder, architecture: Architecture, adapted: Collection[str]
) -> dict[str, str]:
    """Each end by the stored tensor that it is made of; empty where they stay as they are.

    Args:
        folder: The base.
        architecture: What its config.json describes.
        adapted: What an adapter changes, by stored names.
    """
    ends = [
        stored_name(folder, architecture, name)
        for name in (architecture.embed_name, architecture.head_name)
    ]
    changed = any(name in adapted for name in ends)  # each by a pair of its own
    if not architecture.tied or not changed or has_own_head(folder, architecture):
        return {}
    shared = stored_name(folder, architecture, stored_embedding(folder, architecture))
    return {name: name if folder.has(name) else shared for name in ends}
