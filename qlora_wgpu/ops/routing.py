"""Routing of a mixture of experts: which experts a row meets, and where its copies lie.

A row has an *assignment* for each of its top_k experts, and each assignment has a *slot*, a row
among the experts'. Slots of one expert are next to each other, each expert's from a multiple of
``EXPERT_TILE`` on, so that products see tiles of one expert each (``ops/experts.py``); those of new
tokens have no gaps (``NEW_TOKENS_TILE``). How many an
expert has is known on the device only; there is room for any division.
"""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor, matrix
from qlora_wgpu.kernels.experts import EXPERT_TILE, ExpertTiles
from qlora_wgpu.kernels.rowwise import row_constants, row_workgroups
from qlora_wgpu.ops.rows import row_words

_THREADS = 32  # that share the assignments when they are counted and get slots


@dataclass(frozen=True)
class Routing:
    """The experts and slots that the rows of a batch go to.

    Attributes:
        top_k: Experts that each row meets.
        ids: uint32 (rows · top_k), the expert of each assignment.
        weights: (rows, top_k) float32, differentiable.
        slots: uint32 (rows · top_k), the row among the experts' that each assignment got.
        assignments: uint32, the assignment that each of the experts' rows holds, or none.
        tiles: Which expert each tile of rows belongs to.
        rows: How many rows the experts have, unused ones included.
    """

    top_k: int
    ids: Tensor
    weights: Tensor
    slots: Tensor
    assignments: Tensor
    tiles: ExpertTiles
    rows: int


def route(
    g: Graph,
    logits: Tensor,
    top_k: int,
    *,
    normalized: bool,
    scale: float = 1.0,
    tile: int = EXPERT_TILE,
) -> Routing:
    """Chooses experts and gives the assignments slots.

    Args:
        g: The graph.
        logits: (rows, experts) float32, of the router.
        top_k: Experts that each row meets.
        normalized: Whether the weights of the chosen are made to sum up to one.
        scale: Factor of the weights.
        tile: Rows of a tile.

    Raises:
        GraphError: If there are not so many experts.
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
    """uint32 (rows · top_k): the experts with the largest logits, whatever else is chosen by."""
    return _chosen(g, logits, top_k, normalized=True, scale=1.0)[1]["ids"]


def assigned(
    g: Graph, ids: Tensor, weights: Tensor, top_k: int, experts: int, tile: int = EXPERT_TILE
) -> Routing:
    """Gives the assignments of chosen experts slots.

    Args:
        g: The graph.
        ids: uint32 (rows · top_k), the expert of each assignment.
        weights: (rows, top_k) float32.
        top_k: Experts that each row meets.
        experts: How many there are.
        tile: Rows of a tile.
    """
    slots, assignments, tiles, rows = _assign_slots(g, ids, experts, tile)
    return Routing(top_k, ids, weights, slots, assignments, tiles, rows)


def permute(g: Graph, x: Tensor, routing: Routing) -> Tensor:
    """Copies each row to the slots of its assignments.

    Args:
        g: The graph.
        x: (rows, columns) of any type.
        routing: Where to.

    Returns:
        (routing.rows, columns) of x's type; zeros where there is no assignment.

    Raises:
        GraphError: If x does not have the rows that were routed.
    """
    if x.rows != routing.weights.rows:
        raise GraphError(f"permute: {x} does not have the rows of {routing.weights}")
    words = row_words(x)

    def made(x: Tensor) -> Tensor:
        y = matrix(f"{x.name} of experts", routing.rows, x.columns, x.dtype)
        g.launch(
            "experts/permute.wgsl",
            y.rows * words,
            {"x": x, "assignments": routing.assignments, "y": y},
            {"rows": y.rows, "stride": words, "top_k": routing.top_k},
        )
        return y

    y = made(x)

    def vjp(dy: Tensor) -> None:
        dx = g.float32(f"d {x.name}", x.rows, x.columns)
        _combine(g, dy, dx, routing)
        g.add_gradient(x, dx)

    g.record(y, [x], vjp, remake=lambda: made(g.again(x)))
    return y


def combine(g: Graph, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
    """Adds up what the experts made of each row, by their weights.

    Args:
        g: The graph.
        x: (routing.rows, columns) of any type.
        routing: Whose rows are where, and the weights.
        residual: (rows, columns), added if given.

    Returns:
        (rows, columns) float32.

    Raises:
        GraphError: If the shapes do not fit.
    """
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
            {"rows": dx.rows, "stride": dx.units(8), **_top_k_params(routing)},
        )
        g.add_gradient(x, dx)
        if residual is not None:
            g.add_gradient(residual, dy)

    inputs = [x, routing.weights] if residual is None else [x, routing.weights, residual]
    g.record(y, inputs, vjp)
    return y


def most_rows(assignments: int, experts: int, tile: int = EXPERT_TILE) -> int:
    """Rows that so many assignments can take, each expert's ending with a whole tile."""
    unused = (tile - 1) * min(experts, assignments)
    return (assignments + unused) // tile * tile


def _chosen(
    g: Graph, logits: Tensor, top_k: int, *, normalized: bool, scale: float
) -> tuple[dict[str, int | float], dict[str, Tensor]]:
    """Launches the choice; its numbers and its tensors."""
    ids = g.integers("expert ids", logits.rows * top_k)
    weights = g.float32("expert weights", logits.rows, top_k)
    params = {
        "rows": logits.rows,
        "experts": logits.columns,
        "logit_stride": logits.stride,
        "top_k": top_k,
        "weight_stride": weights.stride,
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
        {"rows": y.rows, "stride": y.units(4), **_top_k_params(routing)},
    )


def _weight_grad(g: Graph, dy: Tensor, x: Tensor, routing: Routing) -> None:
    weights = routing.weights
    dweights = g.float32(f"d {weights.name}", weights.rows, weights.columns)
    assignments = weights.rows * routing.top_k
    g.launch(
        "experts/weight_grad.wgsl",
        row_workgroups(g, assignments),
        {"dy": dy, "x": x, "slots": routing.slots, "dweights": dweights},
        {"assignments": assignments, "stride": x.units(4), **_top_k_params(routing)},
        row_constants(g),
    )
    g.add_gradient(weights, dweights)
