"""A frozen linear layer with a LoRA adapter: y = x·Wᵀ + bias + s·(drop(x)·Aᵀ)·Bᵀ (+ residual).

With u = s·drop(x)·Aᵀ and du = s·dy·B the gradients are dB = dyᵀ·u, dA = duᵀ·drop(x) and
dx = dy·W + mask·(du·A): the adapter costs two skinny products and an epilogue of the base's.
"""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.ops import dora
from qlora_wgpu.ops import lora as lora_ops
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.modules import Linear
from qlora_wgpu.ops.tensor import as_operand


def linear(
    g: Graph,
    x: Tensor,
    layer: Linear,
    batch: BatchBuffers,
    residual: Tensor | None = None,
    *,
    multiplier: float = 1.0,
    float32: bool = False,
) -> Tensor:
    """Applies a layer.

    Args:
        g: The graph.
        x: (rows, in_features) operand.
        layer: The layer to apply.
        batch: The micro-batch, for dropout.
        residual: (rows, out_features) float32 to add.
        multiplier: Factor of all but the residual; a layer with a bias takes 1 alone.
        float32: Whether the result is float32 without a residual, too.

    Returns:
        (rows, out_features): float32 with a residual, else an operand.

    Raises:
        GraphError: If the shapes do not fit, or the layer has a bias and the multiplier is not 1.
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
    # DoRA scales what the layer makes before bias and residual are added.
    inverse = None
    added: tuple[Tensor | None, Tensor | None] = layer.bias, residual
    if lora is not None and lora.magnitude is not None:
        inverse = g.float_vector(f"{layer.name}.norm", weight.rows)
        added = None, None
    bias, skip = added
    make = g.float32 if (float32 or skip is not None) and inverse is None else g.operand
    y = make(layer.name, x.rows, weight.rows)
    u: Tensor | None = None
    if lora is not None:
        u = lora_ops.down(g, x, lora, batch)
    for row0, w in weight.shards(g):
        term = lora.forward_term(u) if lora is not None and u is not None else None
        product = Gemm(
            x, w, y, True, row0=row0, scale=multiplier, lora=term, bias=bias, residual=skip,
            label="gemm/forward",
        )  # fmt: skip
        GEMM.launch(g, product)
        if inverse is not None and layer.lora is not None:
            dora.norm(g, w, layer.lora, inverse, row0, layer.lora.scaling)

    def vjp(dy: Tensor) -> None:
        operand, du = as_operand(g, dy), None
        if lora is not None and u is not None:
            du = lora_ops.backward(g, x, u, operand, lora, batch)
        if x.requires_grad:
            dx = g.float32(f"d {x.name}", x.rows, x.columns)
            for row0, w in weight.shards(g):
                term = lora.backward_term(du) if lora is not None and du is not None else None
                product = Gemm(
                    operand, w, dx, False, row0=row0, accumulate=row0 > 0, scale=multiplier,
                    lora=term if row0 == 0 else None,  # it joins the first shard's product
                    batch_info=batch.info, label="gemm/backward",
                )  # fmt: skip
                GEMM.launch(g, product)
            g.add_gradient(x, dx)
        if skip is not None:
            g.add_gradient(skip, dy)

    inputs = [x] if skip is None else [x, skip]
    g.record(y, inputs, vjp, trains=lora is not None)
    if inverse is None or lora is None:
        return y
    return dora.apply(g, y, lora, inverse, layer.bias, residual, float32=float32)
