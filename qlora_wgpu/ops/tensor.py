"""Zeroing, casting and adding whole tensors."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError, ceil_div
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.image import as_buffer, image_copy


def fill_zero(g: Graph, y: Tensor) -> None:
    """Zeroes y."""
    units = ceil_div(y.nbytes, 16)
    g.launch("tensor/fill.wgsl", units, {"y": y}, {"units": units})


def as_operand(g: Graph, x: Tensor, *, image: bool = True) -> Tensor:
    """Returns x as matmuls read it now: itself, or a copy of the graph's element type.

    Args:
        g: The graph.
        x: (rows, columns) float32 or operand.
        image: Whether it is to lie in an image, where the adapter's kernels read those.
    """
    if x.dtype == g.dtype:
        return image_copy(g, x) if image and g.profile.images and not x.image else x
    y = g.operand(f"{x.name} as operand", x.rows, x.columns, image=image)
    units = x.rows * x.units(8)
    g.launch(
        "tensor/cast.wgsl",
        units,
        {"x": x, "y": y},
        {"units": units},
        {"BF16": True, "IMAGE": y.image},
    )
    return y


def sum_parts(g: Graph, x: Tensor, y: Tensor, parts: int, *, accumulate: bool = False) -> None:
    """Adds up the parts of x, which lie one below the other, into y; all float32."""
    if (x.rows, x.stride, x.dtype) != (parts * y.rows, y.stride, y.dtype):
        raise GraphError(f"sum: {x} is not {parts} times {y}")
    units = y.rows * y.units(4)
    g.launch(
        "tensor/sum_parts.wgsl",
        units,
        {"x": x, "y": y},
        {"units": units, "parts": parts},
        {"ACCUMULATE": accumulate},
    )


def add_into(g: Graph, x: Tensor, y: Tensor) -> None:
    """Adds x to y, both float32 of one layout."""
    if (x.rows, x.stride, x.dtype) != (y.rows, y.stride, y.dtype) or x.dtype != "float32":
        raise GraphError(f"add: {x} and {y} differ")
    units = x.rows * x.units(4)
    g.launch("tensor/add.wgsl", units, {"x": x, "y": y}, {"units": units})


def as_float32(g: Graph, x: Tensor) -> Tensor:
    """An operand as float32, differentiable."""
    y = g.float32(f"{x.name} as float32", x.rows, x.columns)
    units = x.rows * x.units(4)
    tensors = {"x": as_buffer(g, x), "y": y}
    g.launch(
        "tensor/to_float32.wgsl", units, tensors, {"units": units}, {"BF16": x.dtype == "bfloat16"}
    )
    g.record(y, [x], lambda dy: g.hand_over(x, dy))
    return y


def softcap_in_place(g: Graph, y: Tensor, cap: float) -> None:
    """y = cap · tanh(y / cap), float32."""
    units = y.rows * y.units(4)
    g.launch("tensor/softcap.wgsl", units, {"y": y}, {"units": units, "cap": cap})


def cast(g: Graph, x: Tensor) -> Tensor:
    """A float32 matrix as an operand, differentiable."""
    y = as_operand(g, x)
    if y is x:
        return x

    def vjp(dy: Tensor) -> None:
        dx, accumulate = g.gradient_into(x)
        sum_parts(g, dy, dx, 1, accumulate=accumulate)

    g.record(y, [x], vjp)
    return y
