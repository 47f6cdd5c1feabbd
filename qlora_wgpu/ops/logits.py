"""Logits of some rows through ``lm_head``: of the whole vocabulary, or of a block of it."""

from __future__ import annotations

from collections.abc import Iterator

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, row_blocks
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.modules import Head, Matrix, StreamedMatrix
from qlora_wgpu.ops.rows import gather
from qlora_wgpu.ops.tensor import softcap_in_place

_LEAST_ROWS = 16


def chunk_rows(g: Graph, vocab: int, rows: int) -> int:
    """Number of rows whose logits exist at once."""
    fitting = min(g.profile.logits_bytes, g.max_binding) // (4 * vocab)
    return min(max(fitting // _LEAST_ROWS * _LEAST_ROWS, _LEAST_ROWS), rows)


def rows_of_a_text(g: Graph, head: Matrix, rows: int) -> int:
    """``chunk_rows`` where no loss is taken; few of a head that is streamed to save memory."""
    few = isinstance(head, StreamedMatrix)
    return min(_LEAST_ROWS, rows) if few else chunk_rows(g, head.rows, rows)


def logits_of_rows(
    g: Graph, hidden: Tensor, head: Head, batch: BatchBuffers, first: int, count: int
) -> Tensor:
    """float32 logits (count, vocab) of the label rows from ``first`` on."""
    return _logits(g, hidden, head, batch, first, count, head.matrix.rows, head.matrix.shards(g))


def logits_of_block(
    g: Graph, hidden: Tensor, head: Head, batch: BatchBuffers, first: int, count: int, block: Tensor
) -> Tensor:
    """The same of the tokens whose rows of the head are a block, with the same bits."""
    return _logits(g, hidden, head, batch, first, count, block.rows, [(0, block)])


def _logits(
    g: Graph,
    hidden: Tensor,
    head: Head,
    batch: BatchBuffers,
    first: int,
    count: int,
    columns: int,
    shards: Iterator[tuple[int, Tensor]] | list[tuple[int, Tensor]],
) -> Tensor:
    chunk = gather(g, hidden, count, first, batch)
    logits = g.float32("logits", count, columns)
    for row0, w in shards:
        product = Gemm(
            chunk, w, logits, True, row0=row0, scale=head.scale, batch_info=batch.info,
            first_row=first, whole_columns=head.matrix.rows, label="lm_head/forward",
        )  # fmt: skip
        GEMM.launch(g, product)
    if head.softcap is not None:
        softcap_in_place(g, logits, head.softcap)
    return logits


def head_blocks(g: Graph, head: Matrix) -> list[tuple[int, Tensor]]:
    """``(first row, some rows)`` of a head: the blocks that products with its columns take."""
    if isinstance(head, StreamedMatrix):
        return list(head.blocks)
    return [
        (row0 + first, block)
        for row0, shard in head.shards(g)
        for first, block in row_blocks(shard, g.profile.head_block)
    ]
