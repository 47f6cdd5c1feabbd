"""A matrix of the vocabulary that is trained whole: PEFT's ``modules_to_save``.

It is kept in float32 in the adapter; what kernels read is the matrix's own place, which is written
anew, rounded to its type, before anything reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, rows_from

Rows = tuple[tuple[int, Tensor], ...]


@dataclass(eq=False)
class TrainedMatrix:
    """All rows of a matrix as a parameter.

    Attributes:
        name: The matrix's module.
        rows: ``(first row, rows)``, float32, in their places in the adapter.
        gradients: Their gradients likewise, summed up.
        padding: A row that gets no gradient where it is looked up.
        originals: Reads what the matrix has in the files, float32, once they are there.
    """

    name: str
    rows: Rows
    gradients: Rows
    padding: int | None = None
    originals: Callable[[], npt.NDArray[np.float32]] | None = None


def overlapping(one: Rows, first: int, count: int) -> list[tuple[int, Tensor]]:
    """Views of those rows that are among ``count`` rows from ``first`` on, behind their first."""
    views = []
    for row0, rows in one:
        begin, end = max(row0, first), min(row0 + rows.rows, first + count)
        if begin < end:
            views.append((begin, rows_from(rows, begin - row0, end - begin)))
    return views


def write_whole(g: Graph, trained: TrainedMatrix, pieces: Sequence[tuple[int, Tensor]]) -> None:
    """Puts the rows where kernels read them.

    Args:
        g: The graph.
        trained: The rows.
        pieces: ``(first row, rows)`` of the matrix, of any type.
    """
    for row0, piece in pieces:
        for first, rows in overlapping(trained.rows, row0, piece.rows):
            units = rows.rows * rows.units(8)
            params = {"units": units, "first": (first - row0) * piece.units(8)}
            tensors = {"rows": rows, "weight": piece}
            g.launch("trained_rows/write_whole.wgsl", units, tensors, params)
