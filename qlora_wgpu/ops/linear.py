"""A frozen linear layer with a LoRA adapter: y = x·Wᵀ + bias + s·(drop(x)·Aᵀ)·Bᵀ (+ residual).

With u = s·drop(x)·Aᵀ and du = s·dy·B the gradients are dB = dyᵀ·u, dA = duᵀ·drop(x) and
dx = dy·W + mask·(du·A): the adapter costs two thin products and an epilogue of the base's.
"""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops import gemm
from qlora_wgpu.ops import lora as lora_ops
from qlora_wgpu.ops.batch import Batch
from qlora_wgpu.ops.modules import Linear
from qlora_wgpu.ops.tensor import as_operand


def linear(
    g: Graph,
    x: Tensor,
    layer: Linear,
    batch: Batch,
    residual: Tensor | None = None,
    *,
    multiplier: float = 1.0,
    float32: bool = False,
) -> Tensor:
    """Applies a layer.

    Args:
        g: The graph.
        x: (rows, in_features) operand.
        layer: What is applied.
        batch: The micro-batch, for dropout.
        residual: (rows, out_features) float32 to add.
        multiplier: Of all but the residual; the layer has no bias where it is not 1.
        float32: Whether the result is float32 without a residual, too.

    Returns:
        (rows, out_features): float32 with a residual, else an operand.
    """
    weight, lora = layer.weight, layer.lora
    if multiplier != 1.0 and layer.bias is not None:
        raise GraphError(f"linear: {layer.name} has a bias, which would miss the multiplier")
    if lora is not None and multiplier != 1.0:
        lora = replace(lora, scaling=multiplier * lora.scaling)
    if residual is not None and (residual.rows, residual.columns) != (x.rows, weight.rows):
        raise GraphError(
            f"linear: {residual} cannot be added to {layer.name}'s {x.rows}x{weight.rows}"
        )
    make = g.float32 if float32 or residual is not None else g.operand
    y = make(layer.name, x.rows, weight.rows)
    u: Tensor | None = None
    if lora is not None:
        u = g.float32(f"{layer.name}.u", x.rows, lora.r)
        lora_ops.down(g, x, lora, u, batch)
    for row0, w in weight.shards(g):
        gemm.nt(
            g, x, w, y, row0=row0, scale=multiplier, lora=lora, u=u, bias=layer.bias,
            residual=residual,
            label="gemm/forward",
        )  # fmt: skip

    def vjp(dy: Tensor) -> None:
        du: Tensor | None = None
        operand = as_operand(g, dy)
        if lora is not None and u is not None:
            du = g.float32(f"d {u.name}", x.rows, lora.r)
            lora_ops.up_grad(g, operand, lora, du)
            lora_ops.add_gradient(g, operand, u, lora.grad_b)
            lora_ops.add_gradient(g, x, du, lora.grad_a, masked_by=lora, batch=batch)
        if x.requires_grad:
            dx, accumulate = g.gradient_into(x)
            for row0, w in weight.shards(g):
                # The adapter's part joins the first shard's product.
                first = row0 == 0
                gemm.nn(
                    g, operand, w, dx, row0=row0, accumulate=accumulate or not first,
                    scale=multiplier,
                    lora=lora if first else None, u=du if first else None, batch=batch,
                    label="gemm/backward",
                )  # fmt: skip
        if residual is not None and residual.requires_grad:
            g.hand_over(residual, dy)

    inputs = [x] if residual is None else [x, residual]
    g.record(y, inputs, vjp, trains=lora is not None)
    return y
