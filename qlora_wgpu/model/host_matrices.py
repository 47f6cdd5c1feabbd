"""The first and the last matrix in host memory: looked up there, or streamed in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from qlora_wgpu.graph.section import Stream
from qlora_wgpu.graph.tensor import Tensor, matrix
from qlora_wgpu.ops.logits import block_rows
from qlora_wgpu.ops.modules import HostMatrix, StreamedMatrix


def row_pieces(rows: int, most: int) -> Iterator[tuple[int, int]]:
    """``(first row, count)`` of pieces of so many rows, and of what is left."""
    for row0 in range(0, rows, most):
        yield row0, min(most, rows - row0)


def streamed_matrix(
    name: str, host: HostMatrix, stream: Stream, max_binding: int, block: int
) -> StreamedMatrix:
    """A matrix whose blocks are sections of a stream.

    Args:
        name: For messages.
        host: The matrix, not read yet.
        stream: What it comes with; its last section should not be in use with the first block.
        max_binding: Largest number of bytes that one binding may show.
        block: Most rows of a block.
    """
    row_bytes = matrix("", 1, host.columns, host.dtype).nbytes
    blocks: list[tuple[int, Tensor]] = []
    for row0, count in row_pieces(host.rows, block_rows(row_bytes, max_binding, block)):
        section = stream.new_section(f"{name} from row {row0}")
        storage = section.storage(name, count * row_bytes)
        blocks.append((row0, matrix(name, count, host.columns, host.dtype, storage)))
    return StreamedMatrix(host.rows, host.columns, tuple(blocks), host)


def fill(streamed: StreamedMatrix, values: npt.NDArray[Any]) -> None:
    """Gives a streamed matrix its rows, of which its sections keep windows.

    Args:
        streamed: The matrix.
        values: (rows, padded columns) as stored.
    """
    streamed.host.values = values
    for row0, block in streamed.blocks:
        assert block.storage is not None and block.storage.section is not None
        block.storage.section.show(values[row0 : row0 + block.rows])
