"""A head of its own in the files of a model whose config.json ties it to the embedding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.model.weight_names import stored_name

_ROWS = 4096  # compared at a time


def has_own_head(folder: ModelFolder, architecture: Architecture) -> bool:
    """Whether the files hold a head and an embedding that differ; transformers uses both then."""
    names = architecture.embed_name, architecture.head_name
    embedding, head = (stored_name(folder, architecture, name) for name in names)
    if not (folder.has(embedding) and folder.has(head)):
        return False
    return not _equal(folder, embedding, head)


def _equal(folder: ModelFolder, one: str, other: str) -> bool:
    if folder.shape(one) != folder.shape(other):
        return False
    if folder.dtype(one) != folder.dtype(other):
        return np.array_equal(_numbers(folder, one), _numbers(folder, other))
    a, b = folder.raw(one), folder.raw(other)
    return all(np.array_equal(a[i : i + _ROWS], b[i : i + _ROWS]) for i in range(0, len(a), _ROWS))


def _numbers(folder: ModelFolder, name: str) -> npt.NDArray[np.float32]:
    stored = folder.quantized(name)
    return folder.float32(name) if stored is None else stored.dequantize()
