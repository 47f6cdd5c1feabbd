"""xIELU (Huang & Schlag, 2024): an activation with scalars that were trained and stay frozen."""

from __future__ import annotations

from dataclasses import dataclass, fields

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor


@dataclass(frozen=True)
class XIELUScalars:
    """What a model's files hold of one xIELU; float32, one element each.

    Attributes:
        alpha_p: The softplus of it bends the positive side.
        alpha_n: The softplus of it, and β, bend the negative side.
        beta: The slope at zero.
        eps: A little below zero: the negative side is computed no nearer to zero.
    """

    alpha_p: Tensor
    alpha_n: Tensor
    beta: Tensor
    eps: Tensor


def xielu(g: Graph, x: Tensor, scalars: XIELUScalars) -> Tensor:
    """Computes softplus(alpha_p) · x² + β · x for x > 0, else as below.

    n · (exp(min(x, eps)) - 1 - x) + β · x, with n = β + softplus(alpha_n).

    Args:
        g: The graph.
        x: (rows, columns) operand.
        scalars: The model's.

    Returns:
        (rows, columns) operand.

    Raises:
        GraphError: If a scalar is none.
    """
    stored = {field.name: getattr(scalars, field.name) for field in fields(scalars)}
    for name, scalar in stored.items():
        if scalar.shape != (1, 1):
            raise GraphError(f"xielu: {name} is {scalar}, not one number")
    y = g.operand("xielu", x.rows, x.columns)
    units = x.rows * x.units(8)
    shape = {"units": units, "stride": x.units(8), "columns": x.columns}
    g.launch("xielu/forward.wgsl", units, {"x": x, "y": y, **stored}, shape)

    def vjp(dy: Tensor) -> None:
        dx = g.operand(f"d {x.name}", x.rows, x.columns)
        tensors = {"dy": dy, "x": x, "dx": dx, **stored}
        g.launch("xielu/backward.wgsl", units, tensors, {"units": units})
        g.add_gradient(x, dx)

    g.record(y, [x], vjp)
    return y
