"""Root mean square normalization (Zhang & Sennrich, 2019) with a frozen weight."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.rows import row_constants, row_workgroups


def rms_norm(g: Graph, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes y = x / √(mean(x²) + eps) · weight.

    Args:
        g: The graph.
        x: (rows, columns) float32.
        weight: (columns) float32, padded.
        eps: Keeps the root from zero.

    Returns:
        (rows, columns) operand.
    """
    y = g.operand(f"norm({x.name})", x.rows, x.columns, image=True)
    rstd = g.float_vector("rstd", x.rows)
    shape: dict[str, int | float] = {"rows": x.rows, "columns": x.columns, "stride": x.units(4)}
    g.launch(
        "rms_norm/forward.wgsl",
        row_workgroups(g, x.rows),
        {"x": x, "weight": weight, "y": y, "rstd": rstd},
        {**shape, "eps": eps},
        {"BF16": g.bf16, "IMAGE": y.image, **row_constants(g)},
    )

    def vjp(dy: Tensor) -> None:
        dx, accumulate = g.gradient_into(x)
        g.launch(
            "rms_norm/backward.wgsl",
            row_workgroups(g, x.rows),
            {"dy": dy, "x": x, "weight": weight, "rstd": rstd, "dx": dx},
            shape,
            {"ACCUMULATE": accumulate, **row_constants(g)},
        )

    g.record(y, [x], vjp)
    return y
