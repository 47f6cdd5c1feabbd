"""Routing of a mixture of experts: each row's experts, the slots of its copies, load balancing.

A row has an *assignment* for each of its top_k experts, and each assignment has a *slot*, a row
among the experts' rows. Slots of one expert are adjacent and start at a multiple of
``EXPERT_TILE``, so that products have tiles of one expert each (``ops/experts.py``); in decoding
there are no gaps (``NEW_TOKENS_TILE``). The number of an expert's rows is only known on the device;
there is room for any distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor, ceil_div, matrix
from qlora_wgpu.kernels.common import (
    EXPERT_TILE,
    ExpertTiles,
    one_row,
    row_constants,
    row_workgroups,
)
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.label_rows import row_words

_THREADS = 32  # that share counting and placing the assignments

# ---- choice by the softmax, and slots --------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """The experts and slots of a batch's rows."""

    top_k: int  # experts per row
    ids: Tensor  # uint32 (rows · top_k), the expert of each assignment
    weights: Tensor  # (rows, top_k) float32, differentiable
    slots: Tensor  # uint32 (rows · top_k), the slot of each assignment
    assignments: Tensor  # uint32, the assignment of each slot, or none
    tiles: ExpertTiles  # the expert of each tile of rows
    rows: int  # the experts' rows, unused ones included


def route(
    g: Graph,
    logits: Tensor,
    top_k: int,
    *,
    normalized: bool,
    scale: float = 1.0,
    tile: int = EXPERT_TILE,
) -> Routing:
    """Selects experts by a router's logits (rows, experts) float32, and assigns slots.

    ``normalized`` weights sum to one before they are multiplied by ``scale``.
    """
    experts = logits.columns
    if logits.dtype != "float32" or not 0 < top_k <= experts:
        raise GraphError(f"route: {top_k} experts cannot be chosen by {logits}")
    params, tensors = _chosen(g, logits, top_k, normalized=normalized, scale=scale)
    constants, ids, weights = {"NORMALIZED": normalized}, tensors["ids"], tensors["weights"]

    def vjp(dweights: Tensor) -> None:
        dlogits = g.float32(f"d {logits.name}", logits.rows, experts)
        gradients = {"dweights": dweights, "dlogits": dlogits}
        read = {**tensors, "logits": None if normalized else logits}
        g.launch(
            "experts/route_backward.wgsl", logits.rows, {**read, **gradients}, params, constants
        )
        g.add_gradient(logits, dlogits)

    g.record(weights, [logits], vjp)
    return assigned(g, ids, weights, top_k, experts, tile)


def largest(g: Graph, logits: Tensor, top_k: int) -> Tensor:
    """uint32 (rows · top_k): the experts with the largest logits."""
    return _chosen(g, logits, top_k, normalized=True, scale=1.0)[1]["ids"]


def assigned(
    g: Graph, ids: Tensor, weights: Tensor, top_k: int, experts: int, tile: int = EXPERT_TILE
) -> Routing:
    slots, assignments, tiles, rows = _assign_slots(g, ids, experts, tile)
    return Routing(top_k, ids, weights, slots, assignments, tiles, rows)


def permute(g: Graph, x: Tensor, routing: Routing) -> Tensor:
    if x.rows != routing.weights.rows:
        raise GraphError(f"permute: {x} does not have the rows of {routing.weights}")
    words = row_words(x)

    def made(x: Tensor) -> Tensor:
        y = matrix(f"{x.name} of experts", routing.rows, x.columns, x.dtype)
        g.launch(
            "experts/permute.wgsl",
            y.rows * words,
            {"x": x, "assignments": routing.assignments, "y": y},
            {"top_k": routing.top_k},
        )
        return y

    y = made(x)

    def vjp(dy: Tensor) -> None:
        dx = g.float32(f"d {x.name}", x.rows, x.columns)
        _combine(g, dy, dx, routing)
        g.add_gradient(x, dx)

    g.record(y, [x], vjp, remat=lambda: made(g.rematerialize(x)))
    return y


def combine(g: Graph, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
    """The weighted sum of each row's expert outputs, in float32."""
    rows = routing.weights.rows
    if residual is not None and residual.shape != (rows, x.columns):
        raise GraphError(f"combine: {residual} cannot be added to {x}")
    if x.rows != routing.rows:
        raise GraphError(f"combine: {x} does not have the experts' {routing.rows} rows")
    y = g.float32("experts", rows, x.columns)
    _combine(g, x, y, routing, weights=routing.weights, residual=residual)

    def vjp(dy: Tensor) -> None:
        if routing.weights.requires_grad:
            _weight_grad(g, dy, x, routing)
        dx = g.operand(f"d {x.name}", x.rows, x.columns)
        g.launch(
            "experts/permute_weighted.wgsl",
            dx.rows * dx.units(8),
            {"x": dy, "assignments": routing.assignments, "weights": routing.weights, "y": dx},
            _top_k_params(routing),
        )
        g.add_gradient(x, dx)
        if residual is not None:
            g.add_gradient(residual, dy)

    inputs = [x, routing.weights] if residual is None else [x, routing.weights, residual]
    g.record(y, inputs, vjp)
    return y


def most_rows(assignments: int, experts: int, tile: int = EXPERT_TILE) -> int:
    """Maximum number of slots of ``assignments``, each expert padded to whole tiles."""
    unused = (tile - 1) * min(experts, assignments)
    return (assignments + unused) // tile * tile


def _chosen(
    g: Graph, logits: Tensor, top_k: int, *, normalized: bool, scale: float
) -> tuple[dict[str, int | float], dict[str, Tensor]]:
    ids = g.integers("expert ids", logits.rows * top_k)
    weights = g.float32("expert weights", logits.rows, top_k)
    params = {
        "experts": logits.columns,
        "top_k": top_k,
        "scale": scale,
        "unscale": 1 / scale if scale else 0.0,
    }
    tensors = {"logits": logits, "ids": ids, "weights": weights}
    g.launch(
        "experts/route.wgsl",
        logits.rows,
        tensors,
        params,
        {"NORMALIZED": normalized},
        turns=(top_k + 1) * logits.columns + 2 * weights.stride,
    )
    return params, tensors


def _assign_slots(
    g: Graph, ids: Tensor, experts: int, tile: int
) -> tuple[Tensor, Tensor, ExpertTiles, int]:
    total = ids.columns
    share, rows = ceil_div(total, _THREADS), most_rows(total, experts, tile)
    threads = {"THREADS": _THREADS}
    constants = {**threads, "EXPERT_TILE": tile}
    counts = g.integers("expert counts", experts * _THREADS)
    g.launch(
        "experts/count.wgsl",
        (experts, 1, 1),
        {"ids": ids, "counts": counts},
        {"count": total, "share": share},
        threads,
        turns=share,
    )
    expert_rows = g.integers("expert rows", 2 * experts)
    g.launch(
        "experts/begin.wgsl",
        experts,
        {"counts": counts, "rows": expert_rows},
        {"experts": experts},
        constants,
    )
    slots, assignments = g.integers("slots", total), g.integers("assignments", rows)
    tiles = g.integers("tile experts", rows // tile)
    g.launch(
        "experts/assign_slots.wgsl",
        (experts, 1, 1),
        {
            "ids": ids,
            "counts": counts,
            "rows": expert_rows,
            "slots": slots,
            "assignments": assignments,
            "tile_experts": tiles,
        },
        {"count": total, "share": share, "experts": experts, "rows_end": rows},
        constants,
        turns=_THREADS + share + 2 * ceil_div(rows, _THREADS),
    )
    return slots, assignments, ExpertTiles(tiles, expert_rows, 0, experts, tile), rows


def _top_k_params(routing: Routing) -> dict[str, int]:
    return {"top_k": routing.top_k, "weight_stride": routing.weights.stride}


def _combine(
    g: Graph,
    x: Tensor,
    y: Tensor,
    routing: Routing,
    *,
    weights: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    g.launch(
        "experts/combine.wgsl",
        y.rows * y.units(4),
        {"x": x, "slots": routing.slots, "y": y, "weights": weights, "residual": residual},
        _top_k_params(routing),
    )


def _weight_grad(g: Graph, dy: Tensor, x: Tensor, routing: Routing) -> None:
    weights = routing.weights
    dweights = g.float32(f"d {weights.name}", weights.rows, weights.columns)
    assignments = weights.rows * routing.top_k
    g.launch(
        "experts/weight_grad.wgsl",
        row_workgroups(g, assignments),
        {"dy": dy, "x": x, "slots": routing.slots, "dweights": dweights},
        {"assignments": assignments, **_top_k_params(routing)},
        row_constants(g),
    )
    g.add_gradient(weights, dweights)


# ---- choice by scores ------------------------------------------------------------------------

MOST_GROUPS = 32  # the selected groups are the bits of a word


@dataclass(frozen=True)
class Scoring:
    """How experts are selected by their scores, and weighted."""

    sigmoid: bool  # whether scores are the logits' sigmoids instead of their softmax
    normalized: bool  # whether the selected scores are divided by their sum
    least: float = 0.0  # added to that sum
    at_least: bool = False  # whether ``least`` is the minimum of the sum instead
    scale: float = 1.0  # factor of all weights
    groups: int = 1  # groups of neighbours that experts are in
    top_groups: int = 1  # number of groups that experts are selected from
    pairs: bool = False  # whether groups are ranked by their two best scores instead of the best

    def fits(self, experts: int, top_k: int) -> bool:
        if not 0 < self.top_groups <= self.groups <= MOST_GROUPS or experts % self.groups:
            return False
        size = experts // self.groups
        return 0 < top_k <= self.top_groups * size and size > (self.pairs and self.groups > 1)


def route_by_scores(
    g: Graph,
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: Scoring,
    tile: int = EXPERT_TILE,
) -> Routing:
    """Selects experts by their scores, and assigns slots.

    A bias (experts) float32 is added to the scores for the selection only: it balances the load
    without a loss, and changes neither weights nor gradients (DeepSeek-V3, 2024, section 2.1.2).
    """
    experts = logits.columns
    fits = scoring.fits(experts, top_k) and (bias is None or bias.columns == experts)
    if logits.dtype != "float32" or not fits:
        raise GraphError(
            f"route_by_scores: {top_k} experts cannot be chosen by {logits} and {bias}, {scoring}"
        )
    ids = g.integers("expert ids", logits.rows * top_k)
    weights = g.float32("expert weights", logits.rows, top_k)
    params = {"experts": experts, "top_k": top_k, "least": scoring.least, "scale": scoring.scale}
    groups = {"groups": scoring.groups, "top_groups": scoring.top_groups}
    constants = {
        "SIGMOID": scoring.sigmoid,
        "NORMALIZED": scoring.normalized,
        "AT_LEAST": scoring.at_least,
    }
    kinds = {"GROUPED": scoring.top_groups < scoring.groups, "PAIRS": scoring.pairs}
    g.launch(
        "experts/route_scored.wgsl",
        logits.rows,
        {"logits": logits, "bias": bias, "ids": ids, "weights": weights},
        {**params, **groups},
        {**constants, **kinds},
        turns=(top_k + scoring.top_groups + 2) * (experts + scoring.groups + 2),
    )

    def vjp(dweights: Tensor) -> None:
        dlogits = g.float32(f"d {logits.name}", logits.rows, experts)
        g.launch(
            "experts/route_scored_backward.wgsl",
            logits.rows,
            {"logits": logits, "ids": ids, "dweights": dweights, "dlogits": dlogits},
            params,
            constants,
        )
        g.add_gradient(logits, dlogits)

    g.record(weights, [logits], vjp)
    return assigned(g, ids, weights, top_k, experts, tile)


# ---- balance ---------------------------------------------------------------------------------


def balance_sums(
    g: Graph, logits: Tensor, ids: Tensor, batch: BatchBuffers, before: Tensor | None = None
) -> Tensor:
    """How often each expert is selected, and the sum of its probabilities, without padding.

    (2, experts) float32; only the second row is differentiable. ``before`` has the sums of the
    previous layers; the loss is computed from the last.
    """
    rows, experts = logits.shape
    if logits.dtype != "float32" or rows != batch.rows or ids.columns % rows:
        raise GraphError(f"balance_sums: {logits} and {ids} do not fit {batch.rows} rows")
    if before is not None and before.shape != (2, experts):
        raise GraphError(f"balance_sums: {before} does not fit {experts} experts")
    sizes = {"rows": rows, "experts": experts}
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
        one_row(g),
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
    """Adds the load-balancing loss times the batch's labels to ``stats``; starts the backward pass.

    As in transformers, the loss is experts · Σ_e f[e] · P[e], where f[e] is the share of all
    layers' tokens that select expert e, and P[e] the mean of its probability, through which alone
    the gradient passes. A step's loss is the mean over its micro-batches, weighted by their labels
    or the labels' weights; the coefficient is in the gradient, not in element 5 of stats.
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
        {"experts": experts, "top_k": top_k, "coefficient": coefficient},
        one_row(g),
    )
    g.add_gradient(sums, dsums)
