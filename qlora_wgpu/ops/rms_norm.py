"""Root mean square normalization (Zhang & Sennrich, 2019) with a frozen weight."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.image import as_buffer
from qlora_wgpu.ops.rows import row_constants, row_workgroups


def rms_norm(
    g: Graph, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor:
    """Computes y = x / √(mean(x²) + eps) · weight (+ residual).

    Args:
        g: The graph.
        x: (rows, columns) float32.
        weight: (columns) float32, padded.
        eps: Keeps the root from zero.
        residual: (rows, columns) float32 to add.

    Returns:
        (rows, columns): float32 with a residual, else an operand.
    """
    if x.columns != weight.columns or x.dtype != "float32":
        raise GraphError(f"rms_norm: {x} and {weight} do not fit")
    if residual is None:
        y = g.operand(f"norm({x.name})", x.rows, x.columns, image=True)
    else:
        y = g.float32(f"norm({x.name})", x.rows, x.columns)
    rstd = g.float_vector("rstd", x.rows)
    shape: dict[str, int | float] = {"rows": x.rows, "columns": x.columns, "stride": x.units(4)}
    added = {} if residual is None else {"residual": residual}
    g.launch(
        "rms_norm/forward.wgsl",
        row_workgroups(g, x.rows),
        {"x": x, "weight": weight, "y": y, "rstd": rstd, **added},
        {**shape, "eps": eps},
        {
            "BF16": y.dtype == "bfloat16",
            "IMAGE": y.image,
            "RESIDUAL": residual is not None,
            **row_constants(g),
        },
    )

    def vjp(dy: Tensor) -> None:
        given = as_buffer(g, dy)
        dx, accumulate = g.gradient_into(x)
        g.launch(
            "rms_norm/backward.wgsl",
            row_workgroups(g, x.rows),
            {"dy": given, "x": x, "weight": weight, "rstd": rstd, "dx": dx},
            shape,
            {"DY_BF16": given.dtype == "bfloat16", "ACCUMULATE": accumulate, **row_constants(g)},
        )
        if residual is not None and residual.requires_grad:
            g.hand_over(residual, dy)

    g.record(y, [x] if residual is None else [x, residual], vjp)
    return y
