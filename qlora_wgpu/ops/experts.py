"""A frozen linear layer of every expert, each with its LoRA adapter, over rows routed to them.

The mathematics is that of ``ops/linear.py``; each tile of rows meets its expert's matrices, and an
expert's gradients are sums over its rows.
"""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops import gemm
from qlora_wgpu.ops import lora as lora_ops
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.modules import ExpertLinear
from qlora_wgpu.ops.routing import Routing
from qlora_wgpu.ops.tensor import as_operand


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
    """
    weight, lora, tiles = layer.weight, layer.lora, routing.tiles
    if x.rows != routing.rows or x.columns != weight.columns:
        raise GraphError(
            f"expert_linear: {x} does not fit {layer.name}'s "
            f"{weight.experts}x{weight.rows}x{weight.columns} and {routing.rows} rows"
        )
    y = g.operand(layer.name, x.rows, weight.rows)
    u: Tensor | None = None
    if lora is not None:
        u = g.float32(f"{layer.name}.u", x.rows, lora.r)
        lora_ops.down(g, x, lora, u, batch, tiles)
    for first, count, w in weight.expert_shards(g):
        here = replace(tiles, first=first, count=count)
        gemm.nt(g, x, w, y, lora=lora, u=u, experts=here, label="gemm/forward")

    def vjp(dy: Tensor) -> None:
        du: Tensor | None = None
        operand = as_operand(g, dy)
        if lora is not None and u is not None:
            du = g.float32(f"d {u.name}", x.rows, lora.r)
            lora_ops.up_grad(g, operand, lora, du, tiles)
            lora_ops.add_gradient(
                g, operand, u, lora.grad_b, expert_rows=tiles.rows, expert_stride=lora.b_stride
            )
            lora_ops.add_gradient(
                g, x, du, lora.grad_a, masked_by=lora, batch=batch,
                expert_rows=tiles.rows, expert_stride=lora.a_stride,
            )  # fmt: skip
        if x.requires_grad:
            dx, accumulate = g.gradient_into(x)
            for first, count, w in weight.expert_shards(g):
                here = replace(tiles, first=first, count=count)
                gemm.nn(
                    g, operand, w, dx, accumulate=accumulate, lora=lora, u=du, batch=batch,
                    experts=here, label="gemm/backward",
                )  # fmt: skip

    g.record(y, [x], vjp, trains=lora is not None)
    return y
