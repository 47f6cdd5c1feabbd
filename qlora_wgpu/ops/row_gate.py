"""A factor for each row, the sigmoid of what a gate makes of it, as shared experts have it."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.rowwise import row_constants, row_workgroups


def row_gate(g: Graph, x: Tensor, gate: Tensor, residual: Tensor | None = None) -> Tensor:
    """Computes y = sigmoid(gate) · x (+ residual), gate a number for each row.

    Args:
        g: The graph.
        x: (rows, columns) of any type.
        gate: (rows, 1) float32.
        residual: (rows, columns), added if given.

    Returns:
        (rows, columns) float32.

    Raises:
        GraphError: If the shapes do not fit.
    """
    fits = gate.shape == (x.rows, 1) and gate.dtype == "float32"
    if not fits or (residual is not None and residual.shape != x.shape):
        raise GraphError(f"row_gate: {x}, {gate} and {residual} do not fit")
    y = g.float32(f"gated {x.name}", x.rows, x.columns)
    strides = {"stride": x.units(8), "gate_stride": gate.stride}
    units = x.rows * x.units(8)
    tensors = {"x": x, "gate": gate, "y": y, "residual": residual}
    g.launch("row_gate/forward.wgsl", units, tensors, {"units": units, **strides})

    def vjp(dy: Tensor) -> None:
        dx, dgate = g.gradient_for(x), g.float32(f"d {gate.name}", gate.rows, 1)
        g.launch(
            "row_gate/backward.wgsl",
            row_workgroups(g, x.rows),
            {"dy": dy, "x": x, "gate": gate, "dx": dx, "dgate": dgate},
            {"rows": x.rows, **strides},
            row_constants(g),
        )
        g.add_gradient(x, dx)
        g.add_gradient(gate, dgate)
        if residual is not None:
            g.add_gradient(residual, dy)

    g.record(y, [x, gate] if residual is None else [x, gate, residual], vjp)
    return y
