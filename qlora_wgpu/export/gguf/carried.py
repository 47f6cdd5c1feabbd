"""What of a base that is a GGUF file goes into the new one as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.configs import EMBEDDING, HEAD
from qlora_wgpu.checkpoint.gguf.element_types import ElementType
from qlora_wgpu.checkpoint.gguf.file import StoredTensor
from qlora_wgpu.checkpoint.gguf.folder import GGUFFolder
from qlora_wgpu.checkpoint.gguf.placement import Placement
from qlora_wgpu.export.gguf.element_types import as_bytes, type_within
from qlora_wgpu.export.gguf.tensors import FileTensor
from qlora_wgpu.export.merged_weights import MergedWeights

# How a file was split, quantized and aligned is not so of the new one.
_LEFT_OUT = ("split.", "quantize.", "general.architecture", "general.alignment")
_Source = tuple[str, Placement, int]  # a tensor, where it lies, and which of its parts


def carried_keys(folder: GGUFFolder) -> dict[str, Any]:
    """A file's metadata, but for what tells of the file alone."""
    metadata = folder.file.metadata
    return {key: value for key, value in metadata.items() if not key.startswith(_LEFT_OUT)}


def carried_tensors(
    merged: MergedWeights, folder: GGUFFolder, wanted: ElementType
) -> tuple[FileTensor, ...]:
    """A file's tensors: bit for bit, but for those that the adapter changes.

    A head that was the embedding, and is no longer, comes after them.

    Args:
        merged: The weights.
        folder: The base.
        wanted: What tensors that are changed are stored as.
    """
    parts: dict[str, list[_Source]] = {}
    for name, placement in folder.placements.items():
        for i, leaf in enumerate(placement.leaves):
            parts.setdefault(leaf.stored, []).append((name, placement, i))
    tensors = [
        _changed(merged, folder, stored, parts[stored], wanted)
        if any(merged.is_adapted(name) for name, _, _ in parts.get(stored, ()))
        else _kept(stored, folder.file.tensor(stored))
        for stored in folder.file.names()
    ]
    if merged.untied:
        tensors.append(_own_head(merged, folder, wanted))
    return tuple(tensors)


def _own_head(merged: MergedWeights, folder: GGUFFolder, wanted: ElementType) -> FileTensor:
    """The head of a model whose embedding and head were one, and are two with the adapter."""
    name = merged.stored_name(merged.architecture.head_name)
    shared = folder.file.tensor(folder.placements[merged.source_of(name)].stored)
    if not merged.is_adapted(name):
        return _kept(HEAD, shared)
    kind = type_within(wanted, shared.place.shape, is_head=True)
    return FileTensor(
        HEAD, shared.place.shape, kind, (lambda: as_bytes(merged.float32(name), kind, HEAD),)
    )


def _kept(name: str, tensor: StoredTensor) -> FileTensor:
    def read() -> Iterator[npt.NDArray[np.uint8]]:
        yield np.ascontiguousarray(tensor.data)
        tensor.release()

    return FileTensor(name, tensor.place.shape, tensor.place.type, (read,))


def _changed(
    merged: MergedWeights,
    folder: GGUFFolder,
    stored: str,
    sources: list[_Source],
    wanted: ElementType,
) -> FileTensor:
    shape = folder.file.tensor(stored).place.shape
    is_shared = stored == EMBEDDING and HEAD not in folder.file and not merged.untied
    kind = type_within(wanted, shape, is_head=stored == HEAD or is_shared)
    ordered = sorted(sources, key=lambda source: source[1].leaves[source[2]].first_row)

    def part(source: _Source) -> Callable[[], Iterator[npt.NDArray[np.uint8]]]:
        name, placement, i = source
        return lambda: as_bytes(placement.as_stored(merged.float32(name))[i], kind, stored)

    return FileTensor(stored, shape, kind, tuple(map(part, ordered)))
