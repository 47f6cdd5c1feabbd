"""A frozen linear layer with a LoRA adapter: y = x·Wᵀ + bias + s·(drop(x)·Aᵀ)·Bᵀ (+ residual).

With u = s·drop(x)·Aᵀ and du = s·dy·B the gradients are dB = dyᵀ·u, dA = duᵀ·drop(x) and
dx = dy·W + mask·(du·A): the adapter costs two thin products and an epilogue of the base's.
"""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, ceil_div
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops import gemm
from qlora_wgpu.ops.batch import Batch
from qlora_wgpu.ops.dropout import dropout_params
from qlora_wgpu.ops.modules import Linear, Lora
from qlora_wgpu.ops.tensor import as_operand


def linear(
    g: Graph, x: Tensor, layer: Linear, batch: Batch, residual: Tensor | None = None
) -> Tensor:
    """Applies a layer.

    Args:
        g: The graph.
        x: (rows, in_features) operand.
        layer: What is applied.
        batch: The micro-batch, for dropout.
        residual: (rows, out_features) float32 to add.

    Returns:
        (rows, out_features): float32 with a residual, else an operand.
    """
    weight, lora = layer.weight, layer.lora
    make = g.operand if residual is None else g.float32
    y = make(layer.name, x.rows, weight.rows)
    u: Tensor | None = None
    if lora is not None:
        u = g.float32(f"{layer.name}.u", x.rows, lora.r)
        gemm.nt(g, x, lora.a, u, scale=lora.scaling, dropout=lora, batch=batch, label="lora/down")
    for row0, w in weight.shards(g):
        gemm.nt(
            g, x, w, y, row0=row0, lora=lora, u=u, bias=layer.bias, residual=residual,
            label="gemm/forward",
        )  # fmt: skip

    def vjp(dy: Tensor) -> None:
        du: Tensor | None = None
        operand = as_operand(g, dy)
        if lora is not None and u is not None:
            du = g.float32(f"d {u.name}", x.rows, lora.r)
            gemm.nn(g, operand, lora.b, du, scale=lora.scaling, label="lora/up_grad")
            _add_gradient(g, operand, u, lora.grad_b)
            _add_gradient(g, x, du, lora.grad_a, masked_by=lora, batch=batch)
        if x.requires_grad:
            dx, accumulate = g.gradient_into(x)
            for row0, w in weight.shards(g):
                # The adapter's part joins the first shard's product.
                first = row0 == 0
                gemm.nn(
                    g, operand, w, dx, row0=row0, accumulate=accumulate or not first,
                    lora=lora if first else None, u=du if first else None, batch=batch,
                    label="gemm/backward",
                )  # fmt: skip
        if residual is not None and residual.requires_grad:
            g.hand_over(residual, dy)

    inputs = [x] if residual is None else [x, residual]
    g.record(y, inputs, vjp, trains=lora is not None)
    return y


def _add_gradient(
    g: Graph,
    x: Tensor,
    u: Tensor,
    gradient: Tensor,
    masked_by: Lora | None = None,
    batch: Batch | None = None,
) -> None:
    """Adds xᵀ·u (dB), or with ``masked_by`` its transpose with x masked (dA)."""
    transposed = masked_by is not None
    masked = masked_by is not None and masked_by.dropout > 0
    tensors = {"x": x, "u": u, "g": gradient}
    if masked and batch is not None:
        tensors["batch_info"] = batch.info
    lanes = g.profile.thin_group[1]
    g.launch(
        "lora/grad.wgsl",
        (ceil_div(x.columns, 4 * lanes), ceil_div(u.columns, 4), 1),
        tensors,
        {
            "rows": x.rows,
            "x_columns": x.columns,
            "x_stride": x.units(4),
            "r": u.columns,
            "r_stride": u.units(4),
            "g_stride": gradient.units(4),
            **dropout_params(masked_by),
        },
        {
            "BF16": x.dtype == "bfloat16",
            "TRANSPOSED": transposed,
            "DROPOUT": masked,
            "WG_N": lanes,
        },
        flops=2 * x.rows * x.columns * u.columns,
        label="lora/grad_a" if transposed else "lora/grad_b",
    )
