"""Trained rows of an embedding or a head among an adapter's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.lora.adapter_config import AdapterConfig, TokenIndices
from qlora_wgpu.lora.names import TOKENS, Float32Array, parse_name


@dataclass(frozen=True)
class StoredRows:
    """A matrix's trained rows.

    Attributes:
        module: The matrix's module.
        indices: Which rows they take the place of.
        rows: (indices, columns).
    """

    module: str
    indices: Sequence[int]
    rows: Float32Array


def stored_rows(tensors: Mapping[str, Float32Array], config: AdapterConfig) -> Iterator[StoredRows]:
    """The trained rows of an adapter as ``load_adapter`` reads it."""
    for name, rows in tensors.items():
        parsed = parse_name(name)
        if parsed is not None and parsed[1] == TOKENS:
            yield StoredRows(parsed[0], _indices_of(parsed[0], config), rows)


def is_whole_matrix(name: str) -> bool:
    """Whether a tensor is the base's matrix, which PEFT writes beside what it adapts of it.

    That is so of trained rows of a resized one, and of a pair on the head or the embedding. All its
    rows are the base's or trained, so it need not be read.
    """
    return name.endswith(".base_layer.weight")


def without_copies(
    where: Path, tensors: Mapping[str, Float32Array], indices: TokenIndices | None
) -> dict[str, Float32Array]:
    """An adapter's tensors without the rows that PEFT writes once more, of a head that is tied.

    Raises:
        CheckpointError: If a copy is another one.
    """
    kept = dict(tensors)
    rows = [n for n in kept if (parsed := parse_name(n)) is not None and parsed[1] == TOKENS]
    if not isinstance(indices, list) or len(rows) < 2:
        return kept
    own = next((name for name in rows if ".lm_head." not in name), rows[0])
    for name in rows:
        if name != own and not np.array_equal(kept[name], kept[own]):
            raise CheckpointError(f"{where}: {name!r} and {own!r} are tied, but differ")
    return {name: array for name, array in kept.items() if name == own or name not in rows}


def check_trained_rows(
    where: Path, tensors: Mapping[str, Float32Array], config: AdapterConfig
) -> None:
    """Sees that each matrix that is said to have trained rows has so many, and no other has any.

    Raises:
        CheckpointError: If that is not so, or a number is not finite.
    """
    indices = config.trainable_token_indices
    every = list(stored_rows(tensors, config))
    if indices and not every:
        raise CheckpointError(f"{where}: trainable_token_indices is set, but it holds no rows")
    for each in every:
        if not each.indices:
            raise CheckpointError(
                f"{where}: it holds rows of {each.module}, of which trainable_token_indices says "
                "nothing"
            )
        if each.rows.ndim != 2 or len(each.rows) != len(each.indices) or not each.rows.size:
            raise CheckpointError(
                f"{where}: the trained rows of {each.module} have shape {each.rows.shape}, but "
                f"trainable_token_indices names {len(each.indices)} tokens"
            )
        if not np.isfinite(each.rows).all():
            raise CheckpointError(f"{where}: the trained rows of {each.module} are not finite")


def _indices_of(module: str, config: AdapterConfig) -> Sequence[int]:
    indices = config.trainable_token_indices or []
    if isinstance(indices, list):
        return indices
    named = (rows for name, rows in indices.items() if f".{module}".endswith(f".{name}"))
    return next(named, [])
