"""The linear layers of a mixture's experts, each with its adapter, over rows routed to them.

The mathematics is that of ``ops/linear.py``; each tile of rows meets its expert's matrices, and an
expert's gradients are sums over its rows.
"""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.common import ExpertTiles
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.kernels.matvec import FEW_ROWS, FewRows
from qlora_wgpu.ops import linear
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.modules import ExpertLinear
from qlora_wgpu.ops.quantized import QuantizedMatrix, rows_of
from qlora_wgpu.ops.routing import Routing
from qlora_wgpu.ops.tensor import as_operand


def with_factors(g: Graph, routing: Routing, factors: Tensor) -> Routing:
    """Multiplies each assignment's weight by its expert's factor.

    Args:
        g: The graph.
        routing: Where rows go, and by which weights.
        factors: (experts) float32, frozen.

    Returns:
        The same routing with other weights.

    Raises:
        GraphError: If there are not as many factors as experts.
    """
    weights = routing.weights
    count = routing.tiles.count
    if factors.shape != (1, count):
        raise GraphError(f"with_factors: {factors} is not a number for each of {count} experts")
    params = {"rows": weights.rows, "top_k": routing.top_k, "stride": weights.stride}
    shared = {
        "slots": routing.slots,
        "tile_experts": routing.tiles.experts,
        "factors": factors,
    }

    def multiplied(w: Tensor, name: str) -> Tensor:
        y = g.float32(name, weights.rows, weights.columns)
        g.launch(
            "experts/factors.wgsl",
            weights.rows * weights.stride,
            {"w": w, **shared, "y": y},
            params,
            {"EXPERT_TILE": routing.tiles.tile},
        )
        return y

    y = multiplied(weights, "factored expert weights")
    g.record(y, [weights], lambda dy: g.add_gradient(weights, multiplied(dy, "d expert weights")))
    return replace(routing, weights=y)


def expert_linear(
    g: Graph, x: Tensor, layer: ExpertLinear, routing: Routing, batch: BatchBuffers
) -> Tensor:
    """Applies each expert's layer to its rows.

    Args:
        g: The graph.
        x: (routing.rows, in_features) operand.
        layer: What is applied.
        routing: Whose rows are where.
        batch: The micro-batch, for dropout.

    Returns:
        (routing.rows, out_features) operand; tiles that no expert has are left as they were.

    Raises:
        GraphError: If x does not fit the layer or the routing, or the bias the layer.
    """
    weight, lora, tiles = layer.weight, layer.lora, routing.tiles
    if x.rows != routing.rows or x.columns != weight.columns:
        raise GraphError(
            f"expert_linear: {x} does not fit {layer.name}'s "
            f"{weight.experts}x{weight.rows}x{weight.columns} and {routing.rows} rows"
        )
    if layer.bias is not None and layer.bias.shape != (weight.experts, weight.rows):
        raise GraphError(f"expert_linear: {layer.bias} is not the bias of {layer.name}'s experts")
    y = g.operand(layer.name, x.rows, weight.rows)
    if batch.decodes:
        _product_of_few(g, x, layer, tiles, y)
        return y
    u = None if lora is None else linear.down(g, x, lora, batch, tiles)
    for first, count, w in weight.expert_shards(g):
        here = replace(tiles, first=first, count=count)
        term = lora.forward_term(u) if lora is not None and u is not None else None
        product = Gemm(
            x, w, y, True, lora=term, bias=layer.bias, experts=here, label="gemm/forward"
        )
        GEMM.launch(g, product)

    def vjp(dy: Tensor) -> None:
        operand, du = as_operand(g, dy), None
        if lora is not None and u is not None:
            du = linear.backward(g, x, u, operand, lora, batch, tiles)
        if x.requires_grad:
            dx = g.float32(f"d {x.name}", x.rows, x.columns)
            for first, count, w in weight.expert_shards(g):
                here = replace(tiles, first=first, count=count)
                term = lora.backward_term(du) if lora is not None and du is not None else None
                product = Gemm(
                    operand, w, dx, False, lora=term, batch_info=batch.info, experts=here,
                    label="gemm/backward",
                )  # fmt: skip
                GEMM.launch(g, product)
            g.add_gradient(x, dx)

    g.record(y, [x], vjp, trains=lora is not None)
    return y


def _product_of_few(
    g: Graph, x: Tensor, layer: ExpertLinear, tiles: ExpertTiles, y: Tensor
) -> None:
    """The same for new tokens, of the chosen experts alone: decoded on the way where it can be."""
    weight, lora, term = layer.weight, layer.lora, None
    if lora is not None:
        u = g.float32("lora u", x.rows, lora.r)
        down = FewRows(
            x, lora.a, (u,), scale=lora.scaling, experts=tiles, columns_each=lora.r,
            apart=lora.a_stride, label="lora/down",
        )  # fmt: skip
        FEW_ROWS.launch(g, down)
        term = lora.forward_term(u)
    whole = rows_of(g, [weight]) if isinstance(weight, QuantizedMatrix) else None
    for first, count, w in weight.expert_shards(g) if whole is None else [(0, tiles.count, whole)]:
        here = replace(tiles, first=first, count=count)
        FEW_ROWS.launch(g, FewRows(x, w, (y,), lora=term, bias=layer.bias, experts=here))
