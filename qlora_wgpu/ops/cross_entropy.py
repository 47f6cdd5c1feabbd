"""The language model's loss, fused with ``lm_head``: logits exist for a chunk of rows at a time.

Only rows with a label are multiplied (the batch lists them), and the gradient with respect to
the hidden states is made in the same pass, so that no logits are kept or computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, row_blocks
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.kernels.rowwise import row_constants, row_workgroups
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.modules import Head, Matrix
from qlora_wgpu.ops.rows import gather, scatter
from qlora_wgpu.ops.tensor import fill_zero, softcap_in_place


@dataclass(frozen=True)
class Objective:
    """The loss that is minimized: (1 - ε)·nll(target) + ε·mean over the vocabulary of nll + ζ·lse².

    Attributes:
        label_smoothing: ε, as in Hugging Face's trainer (Szegedy et al., 2016).
        z_loss: ζ, which keeps the softmax's normalizer near one (Chowdhery et al., 2022).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


PLAIN = Objective()


def chunk_rows(g: Graph, vocab: int, rows: int) -> int:
    """Number of rows whose logits exist at once."""
    fitting = min(g.profile.logits_bytes, g.max_binding) // (4 * vocab)
    return min(max(fitting // 16 * 16, 16), rows)


def logits_of_rows(
    g: Graph, hidden: Tensor, head: Head, batch: BatchBuffers, first: int, count: int
) -> Tensor:
    """float32 logits (count, vocab) of the label rows from ``first`` on."""
    chunk = gather(g, hidden, count, first, batch)
    logits = g.float32("logits", count, head.matrix.rows)
    for row0, w in head.matrix.shards(g):
        product = Gemm(
            chunk, w, logits, True, row0=row0, scale=head.scale, batch_info=batch.info,
            first_row=first, label="lm_head/forward",
        )  # fmt: skip
        GEMM.launch(g, product)
    if head.softcap is not None:
        softcap_in_place(g, logits, head.softcap)
    return logits


def cross_entropy(
    g: Graph,
    hidden: Tensor,
    head: Head,
    batch: BatchBuffers,
    stats: Tensor,
    *,
    gradient: bool,
    objective: Objective = PLAIN,
) -> None:
    """Adds a batch's summed loss and label count to ``stats``; starts the reverse pass.

    Args:
        g: The graph.
        hidden: (rows, hidden_size) operand, normalized.
        head: ``lm_head``, (vocab_size, hidden_size), and what its logits go through.
        batch: The micro-batch's label rows and targets.
        stats: float32; element 0 gets the sum of losses, element 1 their number.
        gradient: Whether d loss / d hidden is made and added.
        objective: The loss that is summed up.
    """
    losses = g.float_vector("losses", batch.rows)
    gradient = gradient and hidden.requires_grad
    dhidden = g.float32(f"d {hidden.name}", hidden.rows, hidden.columns) if gradient else None
    if dhidden is not None:
        fill_zero(g, dhidden)
    step = chunk_rows(g, head.matrix.rows, batch.rows)
    for first in range(0, batch.rows, step):
        count = min(step, batch.rows - first)
        logits = logits_of_rows(g, hidden, head, batch, first, count)
        dlogits = _softmax(g, logits, head.softcap, batch, losses, first, gradient, objective)
        if dhidden is None or dlogits is None:
            continue
        dchunk = g.float32("d hidden rows", count, hidden.columns)
        for row0, w in _head_blocks(g, head.matrix):
            product = Gemm(
                dlogits, w, dchunk, False, row0=row0, scale=head.scale, accumulate=row0 > 0,
                batch_info=batch.info, first_row=first, label="lm_head/backward",
            )  # fmt: skip
            GEMM.launch(g, product)
        scatter(g, dchunk, dhidden, first, batch)
    _total(g, losses, batch, stats)
    if dhidden is not None:
        g.add_gradient(hidden, dhidden)


def _total(g: Graph, losses: Tensor, batch: BatchBuffers, stats: Tensor) -> None:
    constants = row_constants(g)
    del constants["ROWS"]
    g.launch(
        "cross_entropy/total.wgsl",
        (1, 1, 1),
        {"losses": losses, "batch_info": batch.info, "stats": stats},
        constants=constants,
    )


def _head_blocks(g: Graph, head: Matrix) -> Iterator[tuple[int, Tensor]]:
    for row0, shard in head.shards(g):
        for first, block in row_blocks(shard, g.profile.head_block):
            yield row0 + first, block


def _softmax(
    g: Graph,
    logits: Tensor,
    softcap: float | None,
    batch: BatchBuffers,
    losses: Tensor,
    first: int,
    gradient: bool,
    objective: Objective,
) -> Tensor | None:
    dlogits = g.operand("d logits", logits.rows, logits.columns) if gradient else None
    g.launch(
        "cross_entropy/forward.wgsl",
        row_workgroups(g, logits.rows),
        {
            "logits": logits,
            "rows": batch.label_rows,
            "targets": batch.targets,
            "batch_info": batch.info,
            "losses": losses,
            "dlogits": dlogits,
        },
        {
            "count": logits.rows,
            "first": first,
            "columns": logits.columns,
            "stride": logits.units(4),
            "softcap": softcap or 1.0,
            "smoothing": objective.label_smoothing,
            "z_loss": objective.z_loss,
        },
        {
            "SOFTCAP": softcap is not None,
            "OBJECTIVE": objective != PLAIN,
            **row_constants(g, logits.columns),
        },
    )
    return dlogits
