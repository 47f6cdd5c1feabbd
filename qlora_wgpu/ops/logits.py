"""Logits of some rows through ``lm_head``: the whole vocabulary, or a block of it."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import ROW_UNIT, Tensor, row, row_blocks, rows_from
from qlora_wgpu.kernels.gemm import GEMM, PART_UNIT, Gemm, LoraTerm, PackedWeights, QuantizedView
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.ops import linear
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.label_rows import gather
from qlora_wgpu.ops.modules import Head, Matrix, StreamedMatrix
from qlora_wgpu.ops.tensor import softcap_in_place

Shard = tuple[int, Tensor | QuantizedView | PackedWeights]
_LEAST_ROWS = 16
_VIEW_ROWS = 256  # a view of a matrix of any width may begin at multiples of this many rows


def chunk_rows(g: Graph, vocab: int, rows: int) -> int:
    fitting = min(g.profile.logits_bytes, g.max_binding) // (4 * vocab)
    return min(max(fitting // _LEAST_ROWS * _LEAST_ROWS, _LEAST_ROWS), rows)


def rows_of_a_text(g: Graph, head: Matrix, rows: int) -> int:
    """``chunk_rows`` without a loss; few rows for a streamed head, which saves memory."""
    few = isinstance(head, StreamedMatrix)
    return min(_LEAST_ROWS, rows) if few else chunk_rows(g, head.rows, rows)


def logits_of_rows(
    g: Graph,
    hidden: Tensor,
    head: Head,
    batch: BatchBuffers,
    first: int,
    count: int,
    u: Tensor | None = None,
    block: tuple[int, Tensor] | None = None,
) -> Tensor:
    """float32 logits (count, vocab) of the label rows from ``first`` on.

    u is the adapter's scaling · dropout(hidden)·Aᵀ of all hidden states, if known. A ``block`` of
    the vocabulary, given by its first row and its rows of the head, has bit-identical logits.
    """
    pair, bias, columns, few = head.pair, head.bias, head.matrix.rows, batch.cache is not None
    if block is None:
        shards = (
            linear.few_rows_operands(g, [head.matrix], batch.packed_weights)
            if few
            else head.matrix.shards(g)
        )
    else:
        row0, columns, shards = block[0], block[1].rows, iter([(0, block[1])])
        if pair is not None:
            pair = replace(pair, b=rows_from(pair.b, row0, columns))
        if bias is not None:  # a binding may begin there
            bias = row(bias.name, columns, bias.dtype, bias.storage, bias.offset + 4 * row0)
    chunk = hidden if batch.decodes else gather(g, hidden, count, first, batch)
    logits = g.float32("logits", count, columns)
    term = _term(g, chunk, pair, batch, first, u)
    for row0, w in shards:
        product = Gemm(
            chunk, w, logits, row0=row0, scale=head.scale, lora=term, batch_info=batch.info,
            bias=bias, first_row=None if few else first, whole_columns=head.matrix.rows,
            few=few, label="lm_head/forward",
        )  # fmt: skip
        GEMM.launch(g, product)
    if head.softcap is not None:
        softcap_in_place(g, logits, head.softcap)
    return logits


def _term(
    g: Graph, chunk: Tensor, lora: Lora | None, batch: BatchBuffers, first: int, u: Tensor | None
) -> LoraTerm | None:
    """The adapter's term of some label rows; without a u it is computed without dropout."""
    if lora is None:
        return None
    if batch.cache is not None:
        return linear.forward_term(g, chunk, lora, batch, few=True)
    if u is None:
        return linear.forward_term(g, chunk, replace(lora, dropout=0.0), batch, few=False)
    return lora.forward_term(gather(g, u, chunk.rows, first, batch))


def block_rows(row_bytes: int, max_binding: int, block: int) -> int:
    """Rows of a block of a head: at most the profile's ``head_block``, and within a binding."""
    fitting = max_binding // row_bytes
    unit = _VIEW_ROWS if fitting >= _VIEW_ROWS else ROW_UNIT
    return max(min(block, fitting // unit * unit), ROW_UNIT)


def shard_rows(row_bytes: int, max_binding: int, block: int) -> int:
    """Rows of a shard of a resident matrix: whole blocks of ``block_rows``."""
    rows = block_rows(row_bytes, max_binding, block)
    return max(max_binding // row_bytes // rows, 1) * rows


def rows_of_a_block(g: Graph, head: Matrix) -> int:
    """Tokens of the vocabulary in a partial sum."""
    if isinstance(head, StreamedMatrix):
        return head.blocks[0][1].rows
    return block_rows(g.weight("", 1, head.columns).nbytes, g.max_binding, g.profile.head_block)


def head_group(g: Graph, rows: int) -> int:
    """Blocks of a resident head whose gradient is one launch, for a chunk of ``rows`` rows.

    With a large vocabulary, chunks have few rows and there are many blocks.
    """
    group, enough = g.profile.head_group, g.profile.head_rows
    return max(min(group, enough // rows), 1) if enough else group


def head_groups(g: Graph, head: Matrix, rows: int) -> list[tuple[int, Tensor]]:
    """``(first row, rows)`` of a resident head, for one product with columns each."""
    block = rows_of_a_block(g, head)
    most = block * (1 if block % PART_UNIT else head_group(g, rows))
    return [
        (row0 + first, group)
        for row0, shard in head.shards(g)
        for first, group in row_blocks(shard, most)
    ]
