"""LayerNorm of every attention head, by a weight of its own or by one that all have."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor


def qk_layer_norm(
    g: Graph, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
) -> Tensor:
    """Computes y = (x - mean) / √(variance + eps) · weight[head] + bias[head] over each head.

    Args:
        g: The graph.
        x: (rows, heads · head_dim).
        weight: (heads, head_dim) float32, or (1, head_dim) for all heads; head_dim is even.
        eps: Keeps the root from zero.
        bias: The same of what is added, if anything.

    Returns:
        (rows, heads · head_dim) operand.

    Raises:
        GraphError: If x has no such heads.
    """
    head_dim = weight.columns
    heads = x.columns // head_dim
    fits = x.columns == heads * head_dim and weight.rows in (1, heads)
    if head_dim % 2 or not fits or (bias is not None and bias.shape != weight.shape):
        raise GraphError(f"qk_layer_norm: {x} has no heads of {weight}, or of {bias}")
    params: dict[str, int | float] = {
        "rows": x.rows,
        "heads": heads,
        "head_dim": head_dim // 2,
        "stride": x.units(2),
        "weight_stride": weight.units(2) if weight.rows > 1 else 0,
        "eps": eps,
    }
    tensors = {"x": x, "weight": weight}

    def made() -> Tensor:
        y = g.operand(f"norm({x.name})", x.rows, x.columns)
        bound = {**tensors, "y": y, "bias": bias}
        g.launch("qk_layer_norm/forward.wgsl", x.rows * heads, bound, params)
        return y

    y = made()

    def vjp(dy: Tensor) -> None:
        dx = g.operand(f"d {x.name}", x.rows, x.columns)
        bound = {**tensors, "dy": dy, "dx": dx}
        g.launch("qk_layer_norm/backward.wgsl", x.rows * heads, bound, params)
        g.add_gradient(x, dx)

    g.record(y, [x], vjp, remake=made)
    return y
