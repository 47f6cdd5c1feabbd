"""Weights of label rows in the loss: a row's loss and its gradient, times a number.

A gradient is linear in such a number, so the head makes it without one, in the pass in which it
finds the losses; the rows of d hidden are multiplied afterwards. So a weight may depend on all of
the batch's losses, and the head is computed once all the same.
"""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.rowwise import row_constants
from qlora_wgpu.ops.batch import BatchBuffers


def weighted_total(
    g: Graph, losses: Tensor, batch: BatchBuffers, stats: Tensor, *, confidence: bool
) -> Tensor:
    """Adds the weighted losses, the sum of the weights and the weighted hits to ``stats``.

    Args:
        g: The graph.
        losses: float32, loss and hit of each label row.
        batch: The micro-batch; without weights each is one.
        stats: float32; element 0 gets the sum of losses, element 1 that of weights, element 4
            that of the weights of hits.
        confidence: Whether each is multiplied by the probability of the row's label, too, through
            which no gradient passes (TRL's ``loss_type: dft``).

    Returns:
        float32, the factor of each label row's gradient.
    """
    factors = g.float_vector("factors of label rows", batch.rows)
    constants = row_constants(g)
    del constants["ROWS"]
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
        constants={"CONFIDENCE": confidence, **constants},
    )
    return factors


def scale_label_rows(g: Graph, x: Tensor, factors: Tensor, batch: BatchBuffers) -> None:
    """x[label_rows[i], :] *= factors[i], in place.

    Args:
        g: The graph.
        x: (rows of the batch, ·) float32.
        factors: float32, of each label row.
        batch: The micro-batch.

    Raises:
        GraphError: If x is not float32, or does not have the batch's rows.
    """
    if x.dtype != "float32" or x.rows != batch.rows:
        raise GraphError(f"scale of label rows: {x} does not have {batch.rows} rows of float32")
    g.launch(
        "rows/scale.wgsl",
        batch.rows * x.units(4),
        {"rows": batch.label_rows, "batch_info": batch.info, "factors": factors, "y": x},
        {"count": batch.rows, "stride": x.units(4)},
    )
