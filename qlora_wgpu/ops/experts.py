"""The linear layers of experts, each with its adapter, over the rows routed to them.

The mathematics is that of ``ops/linear.py``; each tile of rows is multiplied with its expert's
matrices, and an expert's gradients are sums over its rows.
"""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.ops import linear
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.modules import ExpertLinear
from qlora_wgpu.ops.quantized import QuantizedMatrix, rows_of
from qlora_wgpu.ops.routing import Routing
from qlora_wgpu.ops.tensor import as_operand


def with_factors(g: Graph, routing: Routing, factors: Tensor) -> Routing:
    """Multiplies each assignment's weight by its expert's factor, (experts) float32, frozen."""
    weights = routing.weights
    count = routing.tiles.count
    if factors.shape != (1, count):
        raise GraphError(f"with_factors: {factors} must have a number for each of {count} experts")
    params = {"top_k": routing.top_k}
    shared = {"slots": routing.slots, "tile_experts": routing.tiles.experts, "factors": factors}

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
    weight, lora, tiles = layer.weight, layer.lora, routing.tiles
    if x.rows != routing.rows or x.columns != weight.columns:
        raise GraphError(
            f"expert_linear: {x} does not fit {layer.name}'s "
            f"{weight.experts}x{weight.rows}x{weight.columns} and {routing.rows} rows"
        )
    if layer.bias is not None and layer.bias.shape != (weight.experts, weight.rows):
        raise GraphError(f"expert_linear: {layer.bias} is not the bias of {layer.name}'s experts")
    y, few = g.operand(layer.name, x.rows, weight.rows), batch.decodes
    term = linear.forward_term(g, x, lora, batch, tiles, few=few)
    label = "few_rows/forward" if few else "gemm/forward"
    # New tokens are multiplied with codes if possible.
    codes = rows_of(g, [weight]) if few and isinstance(weight, QuantizedMatrix) else None
    for first, count, w in weight.expert_shards(g) if codes is None else [(0, tiles.count, codes)]:
        here = replace(tiles, first=first, count=count)
        product = Gemm(x, w, y, lora=term, bias=layer.bias, experts=here, few=few, label=label)
        GEMM.launch(g, product)
    if few:
        return y

    def vjp(dy: Tensor) -> None:
        operand, back = as_operand(g, dy), None
        if lora is not None and term is not None:
            back = lora.backward_term(linear.backward(g, x, term.u, operand, lora, batch, tiles))
        if x.requires_grad:
            dx = g.float32(f"d {x.name}", x.rows, x.columns)
            for first, count, w in weight.expert_shards(g):
                here = replace(tiles, first=first, count=count)
                product = Gemm(
                    operand, w, dx, False, lora=back, batch_info=batch.info, experts=here,
                    label="gemm/backward",
                )  # fmt: skip
                GEMM.launch(g, product)
            g.add_gradient(x, dx)

    g.record(y, [x], vjp, trains=lora is not None)
    return y
