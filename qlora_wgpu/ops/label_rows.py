"""A batch's label rows: gather, weight and scatter, in chunks."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import ITEM_SIZE, TEXEL, Tensor, matrix
from qlora_wgpu.kernels.common import one_row
from qlora_wgpu.ops.batch import BatchBuffers


def gather(g: Graph, x: Tensor, count: int, first: int, batch: BatchBuffers) -> Tensor:
    """The label rows ``first`` to ``first + count`` of x; zeros if there are fewer."""
    y = matrix(f"{x.name} rows", count, x.columns, x.dtype)
    words = row_words(x)
    g.launch(
        "rows/gather.wgsl",
        count * words,
        {"x": x, "rows": batch.label_rows, "batch_info": batch.info, "y": y},
        {"count": count, "first": first, "stride": words},
    )
    return y


def scatter(g: Graph, x: Tensor, y: Tensor, first: int, batch: BatchBuffers) -> None:
    """The inverse of ``gather``; other rows of y stay unchanged."""
    g.launch(
        "rows/scatter.wgsl",
        x.rows * x.units(4),
        {"x": x, "rows": batch.label_rows, "batch_info": batch.info, "y": y},
        {"first": first},
    )


def transposed(
    g: Graph,
    x: Tensor,
    first: int,
    batch: BatchBuffers,
    factors: Tensor | None = None,
    columns: tuple[int, int] | None = None,
) -> Tensor:
    """A chunk of the label rows as columns: zeros if there are fewer, whatever is in x.

    x (count, columns) has the label rows from ``first`` on; each is multiplied by its factor, if
    given. ``columns`` is the first one and their number; all by default.
    """
    column0, count = columns or (0, x.columns)
    y = matrix(f"{x.name} transposed", count, x.rows, x.dtype)
    g.launch(
        "rows/transposed.wgsl",
        y.rows * y.units(8),
        {"x": x, "batch_info": batch.info, "factors": factors, "y": y},
        {"first": first, "column0": column0},
    )
    return y


def row_words(x: Tensor) -> int:
    return x.stride * ITEM_SIZE[x.dtype] // TEXEL


def weighted_total(
    g: Graph, losses: Tensor, batch: BatchBuffers, stats: Tensor, *, confidence: bool
) -> Tensor:
    """Adds the weighted losses, the sum of the weights and the weighted hits to ``stats``.

    A gradient is linear in its row's weight. So the head computes it without weights, in the same
    pass as the losses, and the rows of d hidden are scaled afterwards (``scale_label_rows``) by the
    factors that this returns: weights may depend on all of the batch's losses, and the head is
    still computed only once. Adds to elements 0, 1 and 4 of stats. With ``confidence`` each weight
    is also multiplied by the probability of the row's label, as a constant (TRL's ``loss_type:
    dft``).
    """
    factors = g.float_vector("factors of label rows", batch.rows)
    g.launch(
        "cross_entropy/weighted_total.wgsl",
        (1, 1, 1),
        {
            "losses": losses,
            "batch_info": batch.info,
            "stats": stats,
            "factors": factors,
            "weights": batch.weights,
        },
        constants={"CONFIDENCE": confidence, **one_row(g)},
    )
    return factors


def scale_label_rows(g: Graph, x: Tensor, factors: Tensor, batch: BatchBuffers) -> None:
    """x[label_rows[i], :] *= factors[i], in place; x (rows of the batch, ·) float32."""
    if x.dtype != "float32" or x.rows != batch.rows:
        raise GraphError(f"scale of label rows: {x} does not have {batch.rows} rows of float32")
    g.launch(
        "rows/scale.wgsl",
        batch.rows * x.units(4),
        {"rows": batch.label_rows, "batch_info": batch.info, "factors": factors, "y": x},
    )
