"""Root mean square normalization (Zhang & Sennrich, 2019) with a frozen weight."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.elementwise import take_parts
from qlora_wgpu.kernels.rowwise import held_row, row_constants, row_workgroups


def rms_norm(
    g: Graph, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor:
    """Computes y = x / √(mean(x²) + eps) · weight (+ residual).

    Args:
        g: The graph.
        x: (rows, columns) float32 or operand.
        weight: (columns) float32, padded.
        eps: Keeps the root from zero.
        residual: (rows, columns) to add.

    Returns:
        (rows, columns): float32 with a residual, else an operand.

    Raises:
        GraphError: If the shapes do not fit.
    """
    if x.columns != weight.columns or (residual is not None and residual.shape != x.shape):
        raise GraphError(f"rms_norm: {x}, {weight} and {residual} do not fit")
    make = g.operand if residual is None else g.float32
    y = make(f"norm({x.name})", x.rows, x.columns)
    rstd = g.float_vector("rstd", x.rows)
    shape = {"rows": x.rows, "columns": x.columns, "stride": x.units(8)}
    # What is added may be x itself, which then has to be there.
    parts = take_parts(g, x) if x.dtype == "float32" and residual is not x else None
    tensors: dict[str, Tensor | None] = {"x": x}
    if parts is not None:
        tensors = {"sum": x, "parts": parts.stacked, "added": parts.added}
    held = held_row(g, x.units(8))
    g.launch(
        "rms_norm/forward.wgsl",
        row_workgroups(g, x.rows, held["EACH"]),
        {**tensors, "weight": weight, "y": y, "rstd": rstd, "residual": residual},
        {**shape, "parts": parts.count if parts is not None else 0, "eps": eps},
        {**row_constants(g), **held},
    )

    def again() -> Tensor:
        same = g.operand(y.name, y.rows, y.columns)
        units = y.rows * y.units(8)
        tensors = {"x": x, "weight": weight, "rstd": rstd, "y": same}
        params = {"units": units, "stride": y.units(8)}
        g.launch("rms_norm/again.wgsl", units, tensors, params)
        return same

    def vjp(dy: Tensor) -> None:
        parts = take_parts(g, dy) if residual is None and not g.is_shared(dy) else None
        given = {"dy": dy} if parts is None else {"parts": parts.stacked}
        dx = g.gradient_for(x)
        g.launch(
            "rms_norm/backward.wgsl",
            row_workgroups(g, x.rows, held["EACH"]),
            {**given, "x": x, "weight": weight, "rstd": rstd, "dx": dx},
            {**shape, "parts": parts.count if parts is not None else 0},
            {"ACCUMULATE": False, **row_constants(g), **held},
        )
        g.add_gradient(x, dx)
        if residual is not None:
            g.add_gradient(residual, dy)

    inputs = [x] if residual is None else [x, residual]
    g.record(y, inputs, vjp, remake=again if residual is None else None)
    return y
