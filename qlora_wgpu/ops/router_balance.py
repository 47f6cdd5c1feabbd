"""The loss that keeps a mixture's routers from preferring few experts (Fedus et al., 2021).

As transformers computes it: experts · Σ_e f[e] · P[e], where f[e] is how many of all layers' tokens
choose expert e and P[e] the mean of its probability, the softmax over all experts. Counts are no
function that has a slope, so the gradient goes through P alone.

Layers sum up one after another; the last sums are what the loss is made of, before the backward.
"""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.rowwise import row_constants
from qlora_wgpu.ops.batch import BatchBuffers


def balance_sums(
    g: Graph,
    logits: Tensor,
    ids: Tensor,
    batch: BatchBuffers,
    before: Tensor | None = None,
) -> Tensor:
    """How often each expert is chosen, and the sum of its probabilities; padding is left out.

    Args:
        g: The graph.
        logits: (rows, experts) float32, of the router.
        ids: uint32 (rows · top_k), the experts with each row's largest logits.
        batch: Whose rows they are.
        before: (2, experts) float32 that is added, the sums of the layers before.

    Returns:
        (2, experts) float32; differentiable in its second row.

    Raises:
        GraphError: If the shapes do not fit.
    """
    rows, experts = logits.shape
    if logits.dtype != "float32" or rows != batch.rows or ids.columns % rows:
        raise GraphError(f"balance_sums: {logits} and {ids} are no choice of {batch.rows} rows")
    if before is not None and before.shape != (2, experts):
        raise GraphError(f"balance_sums: {before} are no sums of {experts} experts")
    sizes = {"rows": rows, "experts": experts, "stride": logits.stride}
    softmax = g.float_vector("router's softmax", 2 * rows)
    g.launch(
        "router_balance/normalizers.wgsl",
        rows,
        {"logits": logits, "segments": batch.segments, "softmax": softmax},
        sizes,
    )
    sums = g.float32("balance sums", 2, experts)
    g.launch(
        "router_balance/sums.wgsl",
        (logits.stride, 1, 1),
        {"logits": logits, "ids": ids, "softmax": softmax, "before": before, "sums": sums},
        {**sizes, "top_k": ids.columns // rows},
        _one_row(g),
    )

    def vjp(dsums: Tensor) -> None:
        dlogits = g.float32(f"d {logits.name}", rows, experts)
        tensors = {"logits": logits, "softmax": softmax, "dsums": dsums, "dlogits": dlogits}
        g.launch("router_balance/backward.wgsl", rows, tensors, sizes)
        g.add_gradient(logits, dlogits)
        if before is not None:
            g.add_gradient(before, dsums)

    g.record(sums, [logits] if before is None else [logits, before], vjp)
    return sums


def balance_loss(
    g: Graph, sums: Tensor, top_k: int, batch: BatchBuffers, stats: Tensor, coefficient: float
) -> None:
    """Adds the loss times the batch's labels to ``stats``; starts the reverse pass.

    So a step's loss is the mean of its micro-batches', weighted by their labels or these' weights.

    Args:
        g: The graph.
        sums: (2, experts) float32, of all layers.
        top_k: Experts that each row meets.
        batch: The micro-batch.
        stats: float32; element 5 gets the loss, without the coefficient.
        coefficient: Factor of the loss in what is minimized, and so of its gradient.
    """
    experts = sums.columns
    dsums = g.float32(f"d {sums.name}", 2, experts)
    g.launch(
        "router_balance/loss.wgsl",
        (1, 1, 1),
        {
            "sums": sums,
            "batch_info": batch.info,
            "stats": stats,
            "dsums": dsums,
            "weights": batch.weights,
        },
        {
            "experts": experts,
            "stride": sums.stride,
            "top_k": top_k,
            "coefficient": coefficient,
        },
        _one_row(g),
    )
    g.add_gradient(sums, dsums)


def _one_row(g: Graph) -> dict[str, int | float | bool]:
    constants = row_constants(g)
    del constants["ROWS"]
    return constants
