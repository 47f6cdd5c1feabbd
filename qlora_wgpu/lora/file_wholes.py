"""Matrices that were trained whole among an adapter's tensors: PEFT's ``modules_to_save``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np

from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.lora.adapter_config import AdapterConfig
from qlora_wgpu.lora.names import WHOLE, Float32Array, parse_name, tensor_name

_COPIES = (".modules_to_save", ".original_module")


def is_other_copy(name: str, names: Collection[str]) -> bool:
    """Whether a tensor is what PEFT writes beside a whole matrix where the vocabulary was resized.

    That is the same matrix by its name in the model, and the one that it took the place of.
    """
    for part in _COPIES:
        if name.endswith(f"{part}.weight"):
            return f"{name.removesuffix(f'{part}.weight')}.weight" in names
    return False


def is_saved(module: str, config: AdapterConfig) -> bool:
    """Whether the settings say that a module was trained whole, as PEFT reads them."""
    if module.endswith(_COPIES):  # without the matrix itself
        return False
    names = config.modules_to_save or []
    # PEFT ties others to the embedding, of which its own settings then say nothing.
    tied = bool(names) and config.ensure_weight_tying
    return tied or any(module.endswith(name) for name in names)


def wholes(tensors: Mapping[str, Float32Array]) -> Iterator[tuple[str, Float32Array]]:
    """The modules of an adapter as ``load_adapter`` reads it, and their matrices."""
    for name, array in tensors.items():
        parsed = parse_name(name)
        if parsed is not None and parsed[1] == WHOLE:
            yield parsed[0], array


def without_tied_copy(
    tensors: Mapping[str, Float32Array], config: AdapterConfig
) -> dict[str, Float32Array]:
    """An adapter's tensors without a tied head, which PEFT writes beside the embedding."""
    kept = dict(tensors)
    found = dict(wholes(tensors)) if config.ensure_weight_tying else {}
    heads = [module for module in found if module.rpartition(".")[2] == "lm_head"]
    others = [array for module, array in found.items() if module not in heads]
    for head in heads:
        if any(np.array_equal(found[head], other) for other in others):
            del kept[tensor_name(head, WHOLE)]
    return kept


def check_whole(where: Path, tensors: Mapping[str, Float32Array], config: AdapterConfig) -> None:
    """Sees that matrices which were trained whole are there, and are finite matrices.

    Raises:
        CheckpointError: If that is not so.
        UnsupportedModelError: If a norm was.
    """
    found = dict(wholes(tensors))
    if config.modules_to_save and not found:
        raise CheckpointError(f"{where}: modules_to_save is set, but it holds no such matrix")
    for module, array in found.items():
        if array.ndim == 1:
            raise UnsupportedModelError(
                f"{where} has a whole {module} (modules_to_save), but only embedding and head are "
                "taken whole: merge the adapter with PEFT, or train it without"
            )
        if array.ndim != 2 or not array.size:
            raise CheckpointError(f"{where}: the {module} it holds has shape {array.shape}")
        if not (np.isfinite(array.min()) and np.isfinite(array.max())):
            raise CheckpointError(f"{where}: the {module} it holds is not finite")
