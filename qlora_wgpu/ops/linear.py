"""A frozen linear layer with a LoRA adapter: y = x·Wᵀ + bias + s·(drop(x)·Aᵀ)·Bᵀ (+ residual).

With u = s·drop(x)·Aᵀ and du = s·dy·B the gradients are dB = dyᵀ·u, dA = duᵀ·drop(x) and
dx = dy·W + mask·(du·A): the adapter costs two skinny products and an epilogue of the base's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.ops import dora, few_rows
from qlora_wgpu.ops import lora as lora_ops
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.dropout import dropout_parts
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
    _check(x, layer, residual, multiplier)
    lora = layer.lora
    if lora is not None:
        lora = replace(lora, scaling=multiplier * lora.scaling)
    if lora is None or lora.magnitude is None:
        parts = _Sum(layer, lora, batch, multiplier, layer.bias, residual)
        return _product(g, x, parts, float32=float32 or residual is not None)
    # DoRA scales what the layer makes before bias and residual are added.
    float32 = float32 or residual is not None
    inverse = _inverse(g, layer, batch)
    scaled = _Sum(layer, lora, batch, multiplier, None, None, inverse)
    if lora.mask is not None and batch.drops:
        # As in PEFT it scales what dropout keeps of the input; the rest passes the base alone.
        kept, rest = dropout_parts(g, x, lora.mask, batch)
        beside = _Sum(layer, None, batch, multiplier, None, residual)
        residual = _product(g, rest, beside, float32=True)
        x, scaled = kept, replace(scaled, lora=replace(lora, dropout=0.0))
    z = _product(g, x, scaled, float32=False)
    return dora.apply(g, z, lora, inverse, layer.bias, residual, float32=float32)


def _inverse(g: Graph, layer: Linear, batch: BatchBuffers) -> Tensor:
    """Room for DoRA's 1 / ‖W + s·B·A‖: new tokens find there what their text's prompt put there."""
    name, rows = f"{layer.name}.norm", layer.weight.rows
    return g.float_vector(name, rows) if batch.cache is None else batch.cache.norm(name, rows)


def _check(x: Tensor, layer: Linear, residual: Tensor | None, multiplier: float) -> None:
    if multiplier != 1.0 and layer.bias is not None:
        raise GraphError(f"linear: {layer.name} has a bias, which would miss the multiplier")
    shape = (x.rows, layer.weight.rows)
    if residual is not None and residual.shape != shape:
        raise GraphError(
            f"linear: {residual} cannot be added to {layer.name}'s {shape[0]}x{shape[1]}"
        )


@dataclass(frozen=True)
class _Sum:
    """What one product makes: multiplier · x·Wᵀ + u·Bᵀ + bias + residual.

    Attributes:
        layer: The layer.
        lora: Its adapter, the multiplier in its scaling.
        batch: The micro-batch, for dropout.
        multiplier: The factor of x·Wᵀ.
        bias: The bias to add.
        residual: The residual to add.
        inverse: Where DoRA's 1 / ‖W + s·B·A‖ go, which want each shard of W, too.
    """

    layer: Linear
    lora: Lora | None
    batch: BatchBuffers
    multiplier: float
    bias: Tensor | None
    residual: Tensor | None
    inverse: Tensor | None = None


def _product(g: Graph, x: Tensor, parts: _Sum, *, float32: bool) -> Tensor:
    layer, lora = parts.layer, parts.lora
    y = (g.float32 if float32 else g.operand)(layer.name, x.rows, layer.weight.rows)
    if parts.batch.decodes:
        _product_of_few(g, x, y, parts)
        return y
    u = None if lora is None else lora_ops.down(g, x, lora, parts.batch)
    term = lora.forward_term(u) if lora is not None and u is not None else None
    for row0, w in layer.weight.shards(g):
        product = Gemm(
            x, w, y, True, row0=row0, scale=parts.multiplier, lora=term, bias=parts.bias,
            residual=parts.residual, label="gemm/forward",
        )  # fmt: skip
        GEMM.launch(g, product)
        if parts.inverse is not None and layer.lora is not None:
            dora.norm(g, w, layer.lora, parts.inverse, row0, layer.lora.scaling)
    inputs = [x] if parts.residual is None else [x, parts.residual]
    wanted = g.dtype if parts.residual is None else None
    g.record(
        y, inputs, lambda dy: _backward(g, x, u, dy, parts), trains=lora is not None, wanted=wanted
    )
    return y


def _product_of_few(g: Graph, x: Tensor, y: Tensor, parts: _Sum) -> None:
    """The same for new tokens."""
    layer = parts.layer
    few_rows.product(
        g, x, layer.weight, y, scale=parts.multiplier, bias=parts.bias, residual=parts.residual,
        term=few_rows.lora_term(g, x, parts.lora), strips=parts.batch.strips,
    )  # fmt: skip


def _backward(g: Graph, x: Tensor, u: Tensor | None, dy: Tensor, parts: _Sum) -> None:
    operand, lora, term = as_operand(g, dy), parts.lora, None
    if lora is not None and u is not None:
        term = lora.backward_term(lora_ops.backward(g, x, u, operand, lora, parts.batch))
    if x.requires_grad:
        dx = g.gradient_for(x)
        for row0, w in parts.layer.weight.shards(g):
            if w.rows < parts.layer.weight.rows:  # shards' products add up
                dx = replace(dx, dtype="float32") if row0 == 0 else dx
            product = Gemm(
                operand, w, dx, False, row0=row0, accumulate=row0 > 0, scale=parts.multiplier,
                lora=term if row0 == 0 else None,  # it joins the first shard's product
                batch_info=parts.batch.info, label="gemm/backward",
            )  # fmt: skip
            GEMM.launch(g, product)
        g.add_gradient(x, dx)
    if parts.residual is not None:
        g.add_gradient(parts.residual, dy)
