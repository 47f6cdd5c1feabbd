"""Trained tokens (``trainable_token_indices``) and matrices (``modules_to_save``).

The trained rows are float32 parts of the adapter. Before anything reads the matrix, they
overwrite its rows, rounded to its type: lookups and products need no special cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Storage, Tensor, rows_from, vector

NONE = 0xFFFFFFFF
"""Stands for no row of a token that is not trained, and for no padding token."""


@dataclass(eq=False)
class TrainableTokens:
    """Some rows of a matrix as a parameter."""

    name: str  # the matrix's module
    indices: tuple[int, ...]  # their distinct row numbers, in the order of ``rows``
    rows: Tensor  # (indices, columns) float32, a view of the adapter
    gradient: Tensor  # their gradient, summed over micro-batches
    count: int  # rows of the matrix
    padding: int | None = None  # the row without a gradient from lookups (padding_idx)
    # (indices, columns), the matrix's own rows, once read.
    originals: npt.NDArray[np.float32] | None = None
    tokens: Tensor = field(init=False)  # ``indices`` on the device
    slots: Tensor = field(init=False)  # each matrix row's place in ``rows``, or none

    def __post_init__(self) -> None:
        self.rows.requires_grad = True
        slots = np.full(self.count, NONE, np.uint32)
        slots[list(self.indices)] = np.arange(len(self.indices), dtype=np.uint32)
        self.tokens = _table(f"trained rows of {self.name}", np.array(self.indices, np.uint32))
        self.slots = _table(f"places of rows of {self.name}", slots)

    def within(self, row0: int, count: int) -> bool:
        return any(row0 <= index < row0 + count for index in self.indices)


def overwrite(g: Graph, trained: TrainableTokens, shards: Sequence[tuple[int, Tensor]]) -> None:
    """Writes the trained rows into the matrix's shards, ``(first row, rows)`` of any type."""
    for row0, shard in shards:
        if trained.within(row0, shard.rows):
            g.launch(
                "trained_rows/overwrite.wgsl",
                trained.rows.rows * shard.units(8),
                {"tokens": trained.tokens, "rows": trained.rows, "weight": shard},
                {"row0": row0, "piece_rows": shard.rows},
            )


def overwrite_looked_up(g: Graph, trained: TrainableTokens, ids: Tensor, table: Tensor) -> None:
    """Writes the trained rows into the host's lookup: row m of the table is that of ids[m]."""
    g.launch(
        "trained_rows/overwrite_looked_up.wgsl",
        table.rows * table.units(8),
        {"ids": ids, "slots": trained.slots, "rows": trained.rows, "table": table},
    )


def _table(label: str, values: npt.NDArray[Any]) -> Tensor:
    return vector(label, values.size, "uint32", Storage(label, "tables", values.nbytes, values))


Rows = tuple[tuple[int, Tensor], ...]


@dataclass(eq=False)
class SavedModule:
    """All rows of a matrix as a parameter."""

    name: str  # the matrix's module
    rows: Rows  # ``(first row, rows)``, float32, views of the adapter
    gradients: Rows  # views of their gradients, summed over micro-batches
    padding: int | None = None  # the row without a gradient from lookups
    # Reads the matrix from the files, float32.
    originals: Callable[[], npt.NDArray[np.float32]] | None = None


def overlapping(one: Rows, first: int, count: int) -> list[tuple[int, Tensor]]:
    """``(first row, view)`` of the overlap with ``count`` rows from ``first`` on."""
    views = []
    for row0, rows in one:
        begin, end = max(row0, first), min(row0 + rows.rows, first + count)
        if begin < end:
            views.append((begin, rows_from(rows, begin - row0, end - begin)))
    return views


def write_whole(g: Graph, trained: SavedModule, shards: Sequence[tuple[int, Tensor]]) -> None:
    """Writes the trained matrix into the kernels' shards, ``(first row, rows)`` of any type."""
    for row0, shard in shards:
        for first, rows in overlapping(trained.rows, row0, shard.rows):
            units = rows.rows * rows.units(8)
            params = {"units": units, "first": (first - row0) * shard.units(8)}
            tensors = {"rows": rows, "weight": shard}
            g.launch("trained_rows/write_whole.wgsl", units, tensors, params)
