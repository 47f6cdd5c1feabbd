"""Routing of a mixture of experts: which experts a row meets, and where its copies lie.

A row has a *choice* for each of its top experts. Choices of one expert are put next to each other,
each expert's from a multiple of ``EXPERT_TILE`` rows on, so that products see tiles of one expert
each (``ops/experts.py``). How many an expert has is known on the device only; there is room for
any division.
"""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.graph.dtype import ITEM_SIZE, ceil_div
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import TEXEL, Tensor
from qlora_wgpu.kernels.rowwise import row_constants, row_workgroups
from qlora_wgpu.ops.image import as_buffer
from qlora_wgpu.ops.modules import EXPERT_TILE, ExpertTiles

_LANES = 32  # that share the choices when they are counted and placed


@dataclass(frozen=True)
class Routing:
    """Where the rows of a batch go.

    Attributes:
        top: Experts that each row meets.
        weights: (rows, top) float32, differentiable.
        places: uint32 (rows · top), the row among the experts' that each choice got.
        choices: uint32, the choice that each of the experts' rows holds, or none.
        tiles: Which expert each tile of rows belongs to.
        rows: How many rows the experts have, unused ones included.
    """

    top: int
    weights: Tensor
    places: Tensor
    choices: Tensor
    tiles: ExpertTiles
    rows: int


def route(g: Graph, logits: Tensor, top: int, *, normalized: bool) -> Routing:
    """Chooses experts and gives their choices places.

    Args:
        g: The graph.
        logits: (rows, experts) float32, of the router.
        top: Experts that each row meets.
        normalized: Whether the weights of the chosen are made to sum up to one.
    """
    experts = logits.columns
    if logits.dtype != "float32" or not 0 < top <= experts:
        raise GraphError(f"route: {top} experts cannot be chosen by {logits}")
    ids = _integers("expert ids", logits.rows * top)
    weights = g.float32("expert weights", logits.rows, top)
    params: dict[str, int | float] = {
        "rows": logits.rows,
        "experts": experts,
        "logit_stride": logits.stride,
        "top": top,
        "weight_stride": weights.stride,
    }
    constants = {"NORMALIZED": normalized}
    g.launch(
        "experts/route.wgsl",
        logits.rows,
        {"logits": logits, "ids": ids, "weights": weights},
        params,
        constants,
    )

    def vjp(dweights: Tensor) -> None:
        dlogits = g.float32(f"d {logits.name}", logits.rows, experts)
        tensors = {"ids": ids, "weights": weights, "dweights": dweights, "dlogits": dlogits}
        if not normalized:
            tensors["logits"] = logits
        g.launch("experts/route_backward.wgsl", logits.rows, tensors, params, constants)
        g.hand_over(logits, dlogits)

    g.record(weights, [logits], vjp)
    places, choices, tiles, rows = _place(g, ids, experts)
    return Routing(top, weights, places, choices, tiles, rows)


def spread(g: Graph, x: Tensor, routing: Routing) -> Tensor:
    """Copies each row to the places of its choices.

    Args:
        g: The graph.
        x: (rows, columns) operand.
        routing: Where to.

    Returns:
        (routing.rows, columns) operand; zeros where there is no choice.
    """
    name = f"{x.name} of experts"
    y = Tensor(name, routing.rows, x.columns, x.dtype, x.stride, image=x.image)
    stride = x.stride * ITEM_SIZE[x.dtype] // TEXEL
    g.launch(
        "experts/spread.wgsl",
        routing.rows * stride,
        {"x": x, "choices": routing.choices, "y": y},
        {"rows": routing.rows, "stride": stride, "top": routing.top},
        {"IMAGE": x.image},
    )

    def vjp(dy: Tensor) -> None:
        dx, accumulate = g.gradient_into(x)
        _collect(g, dy, dx, routing, accumulate=accumulate)

    g.record(y, [x], vjp)
    return y


def combine(g: Graph, x: Tensor, routing: Routing, residual: Tensor) -> Tensor:
    """Adds up what the experts made of each row, by their weights.

    Args:
        g: The graph.
        x: (routing.rows, columns) operand.
        routing: Whose rows are where, and the weights.
        residual: (rows, columns) float32, added.

    Returns:
        (rows, columns) float32.
    """
    if residual.columns != x.columns:
        raise GraphError(f"combine: {residual} cannot be added to {x}")
    y = g.float32("experts", residual.rows, residual.columns)
    x_buffer = as_buffer(g, x)
    _collect(g, x_buffer, y, routing, weights=routing.weights, residual=residual)

    def vjp(dy: Tensor) -> None:
        _weight_grad(g, dy, x_buffer, routing)
        dx = g.operand(f"d {x.name}", x.rows, x.columns, image=True)
        g.launch(
            "experts/spread_weighted.wgsl",
            x.rows * x.units(8),
            {"x": dy, "choices": routing.choices, "weights": routing.weights, "y": dx},
            {
                "rows": x.rows,
                "stride": x.units(8),
                "top": routing.top,
                "weight_stride": routing.weights.stride,
            },
            {"BF16": g.bf16, "IMAGE": dx.image},
        )
        g.hand_over(x, dx)
        if residual.requires_grad:
            g.hand_over(residual, dy)

    g.record(y, [x, routing.weights, residual], vjp)
    return y


def most_rows(choices: int, experts: int) -> int:
    """Rows that so many choices can take, each expert's ending with a whole tile."""
    unused = (EXPERT_TILE - 1) * min(experts, choices)
    return (choices + unused) // EXPERT_TILE * EXPERT_TILE


def _place(g: Graph, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, ExpertTiles, int]:
    total = ids.columns
    share, rows = ceil_div(total, _LANES), most_rows(total, experts)
    counts = _integers("expert counts", experts * _LANES)
    g.launch(
        "experts/count.wgsl",
        (experts, 1, 1),
        {"ids": ids, "counts": counts},
        {"count": total, "share": share},
        {"LANES": _LANES},
    )
    expert_rows = _integers("expert rows", 2 * experts)
    g.launch(
        "experts/begin.wgsl",
        experts,
        {"counts": counts, "rows": expert_rows},
        {"experts": experts},
        {"LANES": _LANES, "EXPERT_TILE": EXPERT_TILE},
    )
    places, choices = _integers("places", total), _integers("choices", rows)
    tiles = _integers("tile experts", rows // EXPERT_TILE)
    g.launch(
        "experts/place.wgsl",
        (experts, 1, 1),
        {
            "ids": ids,
            "counts": counts,
            "rows": expert_rows,
            "places": places,
            "choices": choices,
            "tile_experts": tiles,
        },
        {"count": total, "share": share, "experts": experts, "rows_end": rows},
        {"LANES": _LANES, "EXPERT_TILE": EXPERT_TILE},
    )
    return places, choices, ExpertTiles(tiles, expert_rows, 0, experts), rows


def _integers(name: str, count: int) -> Tensor:
    return Tensor(name, 1, count, "uint32", count)


def _collect(
    g: Graph,
    x: Tensor,
    y: Tensor,
    routing: Routing,
    *,
    weights: Tensor | None = None,
    residual: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    tensors = {"x": x, "places": routing.places, "y": y}
    if weights is not None:
        tensors["weights"] = weights
    if residual is not None:
        tensors["residual"] = residual
    g.launch(
        "experts/collect.wgsl",
        y.rows * y.units(4),
        tensors,
        {
            "rows": y.rows,
            "stride": y.units(4),
            "top": routing.top,
            "weight_stride": routing.weights.stride,
        },
        {
            "BF16": x.dtype == "bfloat16",
            "WEIGHTED": weights is not None,
            "RESIDUAL": residual is not None,
            "ACCUMULATE": accumulate,
        },
    )


def _weight_grad(g: Graph, dy: Tensor, x: Tensor, routing: Routing) -> None:
    weights = routing.weights
    if not weights.requires_grad:
        return
    dweights = g.float32(f"d {weights.name}", weights.rows, weights.columns)
    choices = weights.rows * routing.top
    g.launch(
        "experts/weight_grad.wgsl",
        row_workgroups(g, choices),
        {"dy": dy, "x": x, "places": routing.places, "dweights": dweights},
        {
            "choices": choices,
            "stride": x.units(4),
            "top": routing.top,
            "weight_stride": weights.stride,
        },
        {"BF16": x.dtype == "bfloat16", **row_constants(g)},
    )
    g.hand_over(weights, dweights)
