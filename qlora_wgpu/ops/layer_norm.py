"""Layer normalization (Ba et al., 2016) with frozen weight and bias."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.rowwise import row_constants, row_workgroups


def layer_norm(g: Graph, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Computes y = (x - mean) / √(variance + eps) · weight + bias.

    Args:
        g: The graph.
        x: (rows, columns) float32 or operand.
        weight: (columns) float32, padded.
        bias: Like weight, or None.
        eps: Keeps the root from zero.

    Returns:
        (rows, columns) operand.

    Raises:
        GraphError: If the shapes do not fit.
    """
    if x.columns != weight.columns or (bias is not None and bias.columns != x.columns):
        raise GraphError(f"layer_norm: {x}, {weight} and {bias} do not fit")
    shape = {"rows": x.rows, "columns": x.columns}

    def made(stats: Tensor) -> Tensor:
        y = g.operand(f"norm({x.name})", x.rows, x.columns)
        g.launch(
            "layer_norm/forward.wgsl",
            row_workgroups(g, x.rows),
            {"x": x, "weight": weight, "y": y, "stats": stats, "bias": bias},
            {**shape, "stride": x.units(8), "eps": eps},
            row_constants(g),
        )
        return y

    def new_stats() -> Tensor:
        return g.float_vector("mean and rstd", 2 * x.rows)

    stats = new_stats()
    y = made(stats)

    def vjp(dy: Tensor) -> None:
        dx = g.gradient_for(x)
        g.launch(
            "layer_norm/backward.wgsl",
            row_workgroups(g, x.rows),
            {"dy": dy, "x": x, "weight": weight, "stats": stats, "dx": dx},
            {**shape, "stride": x.units(8)},
            {"ACCUMULATE": False, **row_constants(g)},
        )
        g.add_gradient(x, dx)

    g.record(y, [x], vjp, remake=lambda: made(new_stats()))
    return y
