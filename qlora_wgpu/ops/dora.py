"""DoRA (Liu et al., 2024): y = m ⊙ z / ‖W + s·B·A‖ with z = x·Wᵀ + s·(x·Aᵀ)·Bᵀ, a norm per output.

As in PEFT, the norm is a constant in the backward pass: dz = m / ‖·‖ ⊙ dy, dm = Σ dy ⊙ z / ‖·‖.
With dropout, z is computed from the kept part of x, and x·Wᵀ of the dropped part is added without
scaling (``ops/linear.py``).
"""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor, ceil_div
from qlora_wgpu.kernels.common import row_constants, row_workgroups
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.ops.tensor import summed


def norm(
    g: Graph, w: Tensor, lora: Lora, out: Tensor, row0: int, scaling: float, *, plain: bool = False
) -> None:
    """Writes 1 / ‖W + scaling · B·A‖ of a shard of rows into ``out``, or with ``plain`` the norm.

    The shard, of any type, starts at row ``row0`` of the matrix; ``out`` is (out_features) float32.
    """
    if w.columns != lora.a.columns or row0 + w.rows > out.columns:
        raise GraphError(f"dora: {w} from row {row0} on, {lora.a} and {out} do not fit")
    g.launch(
        "dora/norm.wgsl",
        row_workgroups(g, w.rows),
        {"w": w, "a": lora.a, "b": lora.b, "inverse": out},
        {"row0": row0, "r": lora.r, "scale": scaling},
        {"PLAIN": plain, **row_constants(g)},
    )


def apply(
    g: Graph,
    z: Tensor,
    lora: Lora,
    inverse: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    float32: bool,
) -> Tensor:
    """m ⊙ z / ‖·‖ + bias (+ residual), float32 or an operand; ``inverse`` is from ``norm``."""
    magnitude, gradient = lora.magnitude, lora.grad_magnitude
    if magnitude is None or gradient is None:
        raise GraphError("dora: the adapter has no magnitudes")
    if magnitude.columns != z.columns or (residual is not None and residual.shape != z.shape):
        raise GraphError(f"dora: {z}, {magnitude} and {residual} do not fit")
    make = g.float32 if float32 else g.operand
    y = make(f"dora({z.name})", z.rows, z.columns)
    units = z.rows * z.units(8)
    factors = {"magnitude": magnitude, "inverse": inverse}
    added = {"bias": bias, "residual": residual}
    g.launch("dora/apply.wgsl", units, {"z": z, "y": y, **factors, **added})

    def vjp(dy: Tensor) -> None:
        with summed(g, gradient) as total:
            g.launch(
                "dora/magnitude_grad.wgsl",
                z.columns,
                {"dy": dy, "z": z, "inverse": inverse, "g": total},
                turns=ceil_div(z.rows, 8),
            )
        dz = g.operand(f"d {z.name}", z.rows, z.columns)
        g.launch("dora/backward.wgsl", units, {"dy": dy, "dz": dz, **factors})
        g.add_gradient(z, dz)
        if residual is not None:
            g.add_gradient(residual, dy)

    g.record(y, [z] if residual is None else [z, residual], vjp)
    return y
