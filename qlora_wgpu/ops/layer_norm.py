"""Layer normalization (Ba et al., 2016) with frozen weight and bias."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.image import as_buffer
from qlora_wgpu.ops.rows import row_constants, row_workgroups


def layer_norm(g: Graph, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Computes y = (x - mean) / √(variance + eps) · weight + bias.

    Args:
        g: The graph.
        x: (rows, columns) float32.
        weight: (columns) float32, padded.
        bias: Like weight, or None.
        eps: Keeps the root from zero.

    Returns:
        (rows, columns) operand.
    """
    if x.columns != weight.columns or x.dtype != "float32":
        raise GraphError(f"layer_norm: {x} and {weight} do not fit")
    y = g.operand(f"norm({x.name})", x.rows, x.columns, image=True)
    stats = g.float_vector("mean and rstd", 2 * x.rows)
    tensors = {"x": x, "weight": weight, "y": y, "stats": stats}
    if bias is not None:
        tensors["bias"] = bias
    shape: dict[str, int | float] = {"rows": x.rows, "columns": x.columns, "stride": x.units(4)}
    g.launch(
        "layer_norm/forward.wgsl",
        row_workgroups(g, x.rows),
        tensors,
        {**shape, "eps": eps},
        {"BF16": g.bf16, "IMAGE": y.image, "BIAS": bias is not None, **row_constants(g)},
    )

    def vjp(dy: Tensor) -> None:
        given = as_buffer(g, dy)
        dx, accumulate = g.gradient_into(x)
        g.launch(
            "layer_norm/backward.wgsl",
            row_workgroups(g, x.rows),
            {"dy": given, "x": x, "weight": weight, "stats": stats, "dx": dx},
            shape,
            {"DY_BF16": given.dtype == "bfloat16", "ACCUMULATE": accumulate, **row_constants(g)},
        )

    g.record(y, [x], vjp)
    return y
