"""The skinny products of a LoRA adapter and the gradients of its two matrices."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.experts import ExpertTiles
from qlora_wgpu.kernels.lora import DOWN, UP_GRAD, Down, Lora, UpGrad
from qlora_wgpu.kernels.lora_grad import BOTH_GRADS, BothGrads, FactorGrad
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.tensor import summed


def down(
    g: Graph, x: Tensor, lora: Lora, batch: BatchBuffers, experts: ExpertTiles | None = None
) -> Tensor:
    """u = scaling · dropout(x)·Aᵀ, (rows, r) float32.

    Raises:
        GraphError: If the shapes do not fit.
    """
    u = g.float32("lora u", x.rows, lora.r)
    DOWN.launch(g, Down(x, lora, u, batch.info, experts))
    return u


def backward(
    g: Graph,
    x: Tensor,
    u: Tensor,
    dy: Tensor,
    lora: Lora,
    batch: BatchBuffers,
    experts: ExpertTiles | None = None,
) -> Tensor:
    """Adds to the gradients of A and B, and returns du = scaling · dy·B.

    Args:
        g: The graph.
        x: (rows, in_features), what the layer was given.
        u: (rows, r) float32, of the forward.
        dy: (rows, out_features).
        lora: The adapter.
        batch: The micro-batch, for dropout.
        experts: If given, each tile of rows belongs to an expert with factors of its own.

    Raises:
        GraphError: If the shapes do not fit.
    """
    x = g.again(x)
    du = g.float32("d lora u", x.rows, lora.r)
    UP_GRAD.launch(g, UpGrad(dy, lora, du, experts))
    rows = experts.rows if experts is not None else None
    with summed(g, lora.grad_a) as grad_a, summed(g, lora.grad_b) as grad_b:
        of_b = FactorGrad(dy, u, grad_b, expert_rows=rows, expert_stride=lora.b_stride)
        of_a = FactorGrad(x, du, grad_a, True, lora.mask, batch.info, rows, lora.a_stride)
        BOTH_GRADS.launch(g, BothGrads(of_b, of_a))
    return du
