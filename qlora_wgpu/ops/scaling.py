"""A matrix times a number that is stored with the model, and the sum of two times numbers."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor, matrix


def scaled(g: Graph, x: Tensor, scalar: Tensor) -> Tensor:
    """Computes y = scalar · x.

    Args:
        g: The graph.
        x: (rows, columns) of any type.
        scalar: One number, float32, frozen.

    Returns:
        (rows, columns) of x's type.

    Raises:
        GraphError: If the scalar is none.
    """
    if scalar.shape != (1, 1):
        raise GraphError(f"scaled: {scalar} is not one number")
    params = {"units": x.rows * x.units(8)}
    y = matrix(f"scaled {x.name}", x.rows, x.columns, x.dtype)
    tensors = {"x": x, "scalar": scalar, "y": y}
    g.launch("tensor/scale.wgsl", params["units"], tensors, params)

    def vjp(dy: Tensor) -> None:
        dx = g.gradient_for(x)
        tensors = {"x": dy, "scalar": scalar, "y": dx}
        g.launch("tensor/scale.wgsl", params["units"], tensors, params)
        g.add_gradient(x, dx)

    g.record(y, [x], vjp)
    return y


def weighted_sum(g: Graph, x: Tensor, z: Tensor, a: float, b: float) -> Tensor:
    """Computes y = a · x + b · z; no gradient passes to z.

    Args:
        g: The graph.
        x: (rows, columns) of any type.
        z: Like x, frozen.
        a: Factor of x.
        b: Factor of z.

    Returns:
        (rows, columns) operand.

    Raises:
        GraphError: If the shapes do not fit.
    """
    if x.shape != z.shape:
        raise GraphError(f"weighted_sum: {x} and {z} differ")
    units = x.rows * x.units(8)
    y = g.operand(f"{x.name} + {z.name}", x.rows, x.columns)
    params = {"units": units, "a": a, "b": b}
    g.launch("tensor/weighted_sum.wgsl", units, {"x": x, "z": z, "y": y}, params)

    def vjp(dy: Tensor) -> None:
        dx = g.gradient_for(x)
        g.launch("tensor/weighted_sum.wgsl", units, {"x": dy, "z": None, "y": dx}, params)
        g.add_gradient(x, dx)

    g.record(y, [x], vjp)
    return y
