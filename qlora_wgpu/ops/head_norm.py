"""RMSNorm of every attention head by itself, as Qwen 3 and Gemma 3 have it on queries and keys."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.image import as_buffer
from qlora_wgpu.ops.tensor import as_operand


def head_norm(g: Graph, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes y = x / √(mean(x²) + eps) · weight over each head.

    Args:
        g: The graph.
        x: (rows, heads · head_dim) operand.
        weight: (head_dim) float32; head_dim is even.
        eps: Keeps the root from zero.

    Returns:
        (rows, heads · head_dim) operand.
    """
    head_dim = weight.columns
    if head_dim % 2 or x.columns % head_dim:
        raise GraphError(f"head_norm: {x} has no heads of {weight}")
    heads = x.columns // head_dim
    x_buffer = as_buffer(g, x)
    y = g.operand(f"norm({x.name})", x.rows, x.columns)
    params: dict[str, int | float] = {
        "rows": x.rows,
        "heads": heads,
        "head_dim": head_dim,
        "stride": x.stride,
        "eps": eps,
    }
    g.launch(
        "head_norm/forward.wgsl",
        x.rows * heads,
        {"x": x_buffer, "weight": weight, "y": y},
        params,
        {"BF16": g.bf16},
    )

    def vjp(dy: Tensor) -> None:
        dx = g.operand(f"d {x.name}", x.rows, x.columns)
        g.launch(
            "head_norm/backward.wgsl",
            x.rows * heads,
            {
                "dy": as_buffer(g, as_operand(g, dy, image=False)),
                "x": x_buffer,
                "weight": weight,
                "y": dx,
            },
            params,
            {"BF16": g.bf16},
        )
        g.hand_over(x, dx)

    g.record(y, [x], vjp)
    return y
