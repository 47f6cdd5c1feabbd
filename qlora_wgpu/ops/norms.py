"""Norms with frozen weights: RMSNorm (Zhang & Sennrich, 2019), LayerNorm (Ba et al., 2016)."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.common import held_row, row_constants, row_workgroups


def rms_norm(
    g: Graph,
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    float32: bool = False,
) -> Tensor:
    """y = x / √(mean(x²) + eps) · weight (+ residual): an operand, or float32 with a residual."""
    if x.columns != weight.columns or (residual is not None and residual.shape != x.shape):
        raise GraphError(f"rms_norm: {x}, {weight} and {residual} do not fit")
    is_operand = residual is None and not float32
    make = g.operand if is_operand else g.float32
    y = make(f"norm({x.name})", x.rows, x.columns)
    rstd = g.float_vector("rstd", x.rows)
    held = held_row(g, x.units(8))
    g.launch(
        "rms_norm/forward.wgsl",
        row_workgroups(g, x.rows, held["EACH"]),
        {"x": x, "weight": weight, "y": y, "rstd": rstd, "residual": residual},
        {"parts": 0, "eps": eps},
        {**row_constants(g), **held},
    )

    def recompute() -> Tensor:
        same = g.operand(y.name, y.rows, y.columns)
        units = y.rows * y.units(8)
        tensors = {"x": x, "weight": weight, "rstd": rstd, "y": same}
        g.launch("rms_norm/again.wgsl", units, tensors)
        return same

    def vjp(dy: Tensor) -> None:
        dx = g.new_gradient(x)
        g.launch(
            "rms_norm/backward.wgsl",
            row_workgroups(g, x.rows, held["EACH"]),
            {"dy": dy, "x": x, "weight": weight, "rstd": rstd, "dx": dx},
            {"parts": 0},
            {"ACCUMULATE": False, **row_constants(g), **held},
        )
        g.add_gradient(x, dx)
        if residual is not None:
            g.add_gradient(residual, dy)

    inputs = [x] if residual is None else [x, residual]
    g.record(y, inputs, vjp, remat=recompute if is_operand else None)
    return y


def layer_norm(g: Graph, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """y = (x - mean) / √(variance + eps) · weight + bias, an operand; weight and bias float32."""
    if x.columns != weight.columns or (bias is not None and bias.columns != x.columns):
        raise GraphError(f"layer_norm: {x}, {weight} and {bias} do not fit")

    def made(stats: Tensor) -> Tensor:
        y = g.operand(f"norm({x.name})", x.rows, x.columns)
        g.launch(
            "layer_norm/forward.wgsl",
            row_workgroups(g, x.rows),
            {"x": x, "weight": weight, "y": y, "stats": stats, "bias": bias},
            {"eps": eps},
            row_constants(g),
        )
        return y

    def new_stats() -> Tensor:
        return g.float_vector("mean and rstd", 2 * x.rows)

    stats = new_stats()
    y = made(stats)

    def vjp(dy: Tensor) -> None:
        dx = g.new_gradient(x)
        g.launch(
            "layer_norm/backward.wgsl",
            row_workgroups(g, x.rows),
            {"dy": dy, "x": x, "weight": weight, "stats": stats, "dx": dx},
            {},
            {"ACCUMULATE": False, **row_constants(g)},
        )
        g.add_gradient(x, dx)

    g.record(y, [x], vjp, remat=lambda: made(new_stats()))
    return y
