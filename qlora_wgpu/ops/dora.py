"""DoRA (Liu et al., 2024): y = m ⊙ (x·Wᵀ + s·(x·Aᵀ)·Bᵀ) / ‖W + s·B·A‖, a norm for each output.

As in PEFT the norm counts as a constant in the backward: dz = m / ‖·‖ ⊙ dy and
dm = Σ dy ⊙ z / ‖·‖, with z what the layer makes before.
"""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.rowwise import row_constants, row_workgroups
from qlora_wgpu.ops.image import as_buffer
from qlora_wgpu.ops.modules import Lora


def norm(
    g: Graph, w: Tensor, lora: Lora, out: Tensor, row0: int, scaling: float, *, plain: bool = False
) -> None:
    """Puts 1 / ‖W + scaling · B·A‖ of a shard of rows into a vector, or with ``plain`` the norm.

    Args:
        g: The graph.
        w: (rows, in_features) operand, rows row0 and on of the matrix.
        lora: Its A and B.
        out: (out_features) float32.
        row0: First row of the shard.
        scaling: Of B·A.
        plain: Whether the norm itself is wanted.
    """
    g.launch(
        "dora/norm.wgsl",
        row_workgroups(g, w.rows),
        {"w": w, "a": lora.a, "b": lora.b, "inverse": out},
        {
            "rows": w.rows,
            "row0": row0,
            "stride": w.units(4),
            "r": lora.r,
            "r_stride": lora.b.stride,
            "texel0": w.texel0,
            "scale": scaling,
        },
        {"BF16": w.dtype == "bfloat16", "IMAGE": w.image, "PLAIN": plain, **row_constants(g)},
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
    """Scales each output by its magnitude over its norm.

    Args:
        g: The graph.
        z: (rows, out_features) operand.
        lora: Whose magnitude it is.
        inverse: (out_features) float32, of ``norm``.
        bias: (out_features) float32 to add.
        residual: (rows, out_features) float32 to add.
        float32: Whether the result is float32 without a residual, too.

    Returns:
        (rows, out_features): float32 with a residual, else an operand.
    """
    magnitude, gradient = lora.magnitude, lora.grad_magnitude
    if magnitude is None or gradient is None:
        raise GraphError("dora: the adapter has no magnitudes")
    make = g.float32 if float32 or residual is not None else g.operand
    y = make(f"dora({z.name})", z.rows, z.columns)
    tensors = {"z": z, "magnitude": magnitude, "inverse": inverse, "y": y}
    if bias is not None:
        tensors["bias"] = bias
    if residual is not None:
        tensors["residual"] = residual
    params = {"rows": z.rows, "columns": z.columns, "stride": z.units(4)}
    g.launch(
        "dora/apply.wgsl",
        z.rows * z.units(4),
        tensors,
        params,
        {
            "BF16": z.dtype == "bfloat16",
            "OUT_BF16": y.dtype == "bfloat16",
            "BIAS": bias is not None,
            "RESIDUAL": residual is not None,
        },
    )

    def vjp(dy: Tensor) -> None:
        source = as_buffer(g, dy)
        narrow = source.dtype == "bfloat16"
        g.launch(
            "dora/magnitude_grad.wgsl",
            z.columns,
            {"dy": source, "z": z, "inverse": inverse, "g": gradient},
            params,
            {"BF16": z.dtype == "bfloat16", "DY_BF16": narrow},
        )
        dz = g.operand(f"d {z.name}", z.rows, z.columns, image=True)
        g.launch(
            "dora/backward.wgsl",
            z.rows * z.units(8),
            {"dy": source, "magnitude": magnitude, "inverse": inverse, "dz": dz},
            {**params, "stride": z.units(8)},
            {"BF16": g.bf16, "IMAGE": dz.image, "DY_BF16": narrow},
        )
        g.hand_over(z, dz)
        if residual is not None and residual.requires_grad:
            g.hand_over(residual, dy)

    g.record(y, [z] if residual is None else [z, residual], vjp)
    return y
