"""The thin products of a LoRA adapter and the gradients of its two matrices."""

from __future__ import annotations

from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops import gemm, gemm_image
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.dropout import dropout_params
from qlora_wgpu.ops.expert_kernels import expert_constants, expert_count, expert_params
from qlora_wgpu.ops.modules import ExpertTiles, Lora

_ROWS, _RANKS = 4, 8  # of results that a workgroup of the GPUs' kernels makes
_LANES = 8  # of theirs where a profile has no use for them but experts


def down(
    g: Graph,
    x: Tensor,
    lora: Lora,
    u: Tensor,
    batch: BatchBuffers,
    experts: ExpertTiles | None = None,
) -> None:
    """u = scaling · dropout(x)·Aᵀ, with x an operand (rows, in_features), u float32 (rows, r)."""
    if gemm_image.usable(g):
        gemm_image.lora_down(g, x, lora, u, batch, experts)
    elif g.profile.lora_lanes or experts is not None:
        _down(g, x, lora, u, batch, experts)
    else:
        gemm.nt(g, x, lora.a, u, scale=lora.scaling, dropout=lora, batch=batch, label="lora/down")


def up_grad(
    g: Graph, dy: Tensor, lora: Lora, du: Tensor, experts: ExpertTiles | None = None
) -> None:
    """du = scaling · dy·B, with dy an operand (rows, out_features), du float32 (rows, r)."""
    if gemm_image.usable(g):
        gemm_image.lora_up_grad(g, dy, lora, du, experts)
    elif g.profile.lora_lanes or experts is not None:
        _up_grad(g, dy, lora, du, experts)
    else:
        gemm.nn(g, dy, lora.b, du, scale=lora.scaling, label="lora/up_grad")


def add_gradient(
    g: Graph,
    x: Tensor,
    u: Tensor,
    gradient: Tensor,
    masked_by: Lora | None = None,
    batch: BatchBuffers | None = None,
    expert_rows: Tensor | None = None,
    expert_stride: int = 0,
) -> None:
    """Adds xᵀ·u (dB), or with ``masked_by`` its transpose with x masked (dA).

    With ``expert_rows`` each expert's rows add to its own gradient, ``expert_stride`` floats apart.
    """
    if gemm_image.usable(g):
        gemm_image.lora_grad(g, x, u, gradient, masked_by, batch, expert_rows, expert_stride)
        return
    transposed = masked_by is not None
    masked = masked_by is not None and masked_by.dropout > 0
    tensors = {"x": x, "u": u, "g": gradient}
    if masked and batch is not None:
        tensors["batch_info"] = batch.info
    if expert_rows is not None:
        tensors["expert_rows"] = expert_rows
    lanes, row_lanes = g.profile.lora_grad_group
    g.launch(
        "lora/grad.wgsl",
        (ceil_div(x.columns, 4 * lanes), ceil_div(u.columns, 4), expert_count(expert_rows)),
        tensors,
        {
            "rows": x.rows,
            "x_columns": x.columns,
            "x_stride": x.units(4),
            "r": u.columns,
            "r_stride": u.units(4),
            "g_stride": gradient.units(4),
            **dropout_params(masked_by),
            "lora_expert": expert_stride // 4,
        },
        {
            "BF16": x.dtype == "bfloat16",
            "TRANSPOSED": transposed,
            "DROPOUT": masked,
            "WG_N": lanes,
            "ROW_LANES": row_lanes,
            "SPREAD": row_lanes > 1,
            "EXPERTS": expert_rows is not None,
        },
        flops=2 * x.rows * x.columns * u.columns,
        label="lora/grad_a" if transposed else "lora/grad_b",
    )


def _down(
    g: Graph, x: Tensor, lora: Lora, u: Tensor, batch: BatchBuffers, experts: ExpertTiles | None
) -> None:
    tensors = {"x": x, "a": lora.a, "u": u}
    if lora.dropout > 0:
        tensors["batch_info"] = batch.info
    g.launch(
        "lora/down.wgsl",
        (ceil_div(x.rows, _ROWS), ceil_div(lora.r, _RANKS), 1),
        tensors,
        {
            "rows": x.rows,
            "r": lora.r,
            "k_units": x.units(8),
            "u_stride": u.stride,
            "scale": lora.scaling,
            **dropout_params(lora),
            **expert_params(experts, lora.a_stride // 8),
        },
        {
            "BF16": x.dtype == "bfloat16",
            "DROPOUT": lora.dropout > 0,
            "LANES": g.profile.lora_lanes or _LANES,
            **expert_constants(experts, tensors),
        },
        flops=2 * x.rows * x.columns * lora.r,
        label="lora/down",
    )


def _up_grad(g: Graph, dy: Tensor, lora: Lora, du: Tensor, experts: ExpertTiles | None) -> None:
    tensors = {"dy": dy, "b": lora.b, "du": du}
    g.launch(
        "lora/up_grad.wgsl",
        (ceil_div(dy.rows, _ROWS), ceil_div(lora.r, _RANKS), 1),
        tensors,
        {
            "rows": dy.rows,
            "r": lora.r,
            "n": dy.columns,
            "dy_stride": dy.units(8),
            "b_stride": lora.b.units(4),
            "du_stride": du.stride,
            "scale": lora.scaling,
            **expert_params(experts, lora.b_stride // 4),
        },
        {
            "BF16": dy.dtype == "bfloat16",
            "LANES": g.profile.lora_lanes or _LANES,
            **expert_constants(experts, tensors),
        },
        flops=2 * dy.rows * dy.columns * lora.r,
        label="lora/up_grad",
    )
