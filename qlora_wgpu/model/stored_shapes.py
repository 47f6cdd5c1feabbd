"""Whether a folder holds all that config.json speaks of, told before anything is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from operator import lt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.safetensors_format import FLOATS
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.model.weight_names import stored_embedding, stored_name


def check_stored_shapes(folder: ModelFolder, architecture: Architecture) -> None:
    """Refuses a config.json that asks for more than there is in the files, by their headers.

    Smaller shapes are left to those who read the tensors, and so are quantized ones.

    Raises:
        CheckpointError: If a tensor is missing or smaller than config.json says.
    """
    for name, expected in _shapes(folder, architecture):
        stored = stored_name(folder, architecture, name)
        shape = folder.shape(stored)
        is_packed = folder.holds_quantized(stored) or folder.dtype(stored) not in FLOATS
        if is_packed and not folder.tells_shapes:
            continue
        if len(shape) != len(expected) or any(map(lt, shape, expected)):
            raise CheckpointError(
                f"{folder.path}: {stored} has shape {shape}, but config.json asks for {expected}"
            )


def _shapes(
    folder: ModelFolder, architecture: Architecture
) -> Iterator[tuple[str, tuple[int, ...]]]:
    size = (architecture.vocab_size, architecture.hidden_size)
    yield stored_embedding(folder, architecture), size
    if not architecture.tied:
        yield architecture.head_name, size
    yield from architecture.stored_norms.items()
    yield from architecture.routers.items()
    yield from architecture.tables.items()
    for spec in architecture.every_linear:
        yield f"{spec.name}.weight", (spec.out_features, spec.in_features)
        if spec.bias:
            yield f"{spec.name}.bias", (spec.out_features,)
