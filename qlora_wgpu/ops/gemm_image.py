"""Launchers of the matrix products for software adapters, whose operands are images.

They take the arguments of the launchers in ``ops/gemm.py`` and ``ops/lora.py``, which call them.
"""

from __future__ import annotations

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ITEM_SIZE, ceil_div
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import TEXEL, Tensor
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.dropout import dropout_params
from qlora_wgpu.ops.expert_kernels import expert_constants, expert_count, expert_params
from qlora_wgpu.ops.image import as_image
from qlora_wgpu.ops.modules import ExpertTiles, Lora

_RANKS = 8  # ranks that a thin product makes at a time


def usable(g: Graph) -> bool:
    """Whether the adapter has these kernels."""
    return g.profile.images


def nt(
    g: Graph,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    row0: int,
    scale: float,
    lora: Lora | None,
    u: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    batch: BatchBuffers | None,
    first_row: int | None,
    experts: ExpertTiles | None,
    label: str,
) -> None:
    """y[:, row0 : row0 + w.rows] = scale · x·wᵀ + u·bᵀ + bias + residual."""
    lanes = g.profile.image_lanes
    rows = _tile(g.profile.image_nt_rows, x.rows)
    columns = w.rows // (experts.count if experts is not None else 1)
    x_image, x_unit0 = _units(g, x)
    w_image, w_unit0 = _units(g, w)
    tensors = {"x": x_image, "w": w_image, "y": y}
    b_texel0 = 0
    if u is not None and lora is not None:
        tensors["u"] = u
        tensors["b"], b_texel0 = as_image(g, lora.b)
    if bias is not None:
        tensors["bias"] = bias
    if residual is not None:
        tensors["residual"] = residual
    if first_row is not None and batch is not None:
        tensors["batch_info"] = batch.info
    g.launch(
        "gemm/nt_image.wgsl",
        (ceil_div(x.rows, rows), ceil_div(columns, 4 * lanes), 1),
        tensors,
        {
            "rows": x.rows,
            "columns": columns,
            "k_units": x.units(8),
            "x_unit0": x_unit0,
            "x_stride": x.units(8),
            "w_unit0": w_unit0,
            "w_stride": w.units(8),
            "y_stride": y.units(4),
            "y_unit0": row0 // 4,
            "first_row": first_row or 0,
            "r_units": ceil_div(u.columns, 4) if u is not None else 0,
            "r_stride": u.units(4) if u is not None else 0,
            "b_texel0": b_texel0,
            "scale": scale,
            "w_expert": columns * w.units(8),
            **expert_params(experts, lora.b_stride // 4 if lora is not None else 0),
        },
        {
            "BF16": x.dtype == "bfloat16",
            "OUT_BF16": y.dtype == "bfloat16",
            "LORA": u is not None,
            "BIAS": bias is not None,
            "RESIDUAL": residual is not None,
            "ACCUMULATE": False,
            "ROW_COUNT": first_row is not None,
            **expert_constants(experts, tensors),
            **_casts(g, rows),
        },
        flops=2 * x.rows * columns * (x.columns + (u.columns if u is not None else 0)),
        label=label,
    )


def nn(
    g: Graph,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    row0: int,
    accumulate: bool,
    scale: float,
    lora: Lora | None,
    u: Tensor | None,
    batch: BatchBuffers | None,
    first_row: int | None,
    experts: ExpertTiles | None,
    label: str,
) -> None:
    """y (+)= scale · x[:, row0 : row0 + w.rows]·w + mask · u·a."""
    lanes = g.profile.image_lanes
    rows = _tile(g.profile.image_nn_rows, x.rows)
    depth = w.rows // (experts.count if experts is not None else 1)
    x_image, x_unit0 = _units(g, x)
    w_image, w_unit0 = _units(g, w)
    tensors = {"x": x_image, "w": w_image, "y": y}
    a_texel0 = 0
    if u is not None and lora is not None:
        tensors["u"] = u
        tensors["a"], a_texel0 = as_image(g, lora.a)
    masked = u is not None and lora is not None and lora.dropout > 0
    if masked or first_row is not None:
        if batch is None:
            raise GraphError("gemm: dropout and row counts need the batch")
        tensors["batch_info"] = batch.info
    g.launch(
        "gemm/nn_image.wgsl",
        (ceil_div(x.rows, rows), ceil_div(w.columns, 8 * lanes), 1),
        tensors,
        {
            "rows": x.rows,
            "columns": w.columns,
            "k": depth,
            "x_unit0": x_unit0 + row0 // 8,
            "x_stride": x.units(8),
            "w_unit0": w_unit0,
            "w_stride": w.units(8),
            "y_stride": y.units(4),
            "y_unit0": 0,
            "first_row": first_row or 0,
            "r": u.columns if u is not None else 0,
            "r_stride": u.stride if u is not None else 0,
            "a_texel0": a_texel0,
            "scale": scale,
            **dropout_params(lora if masked else None),
            "w_expert": depth * w.units(8),
            **expert_params(experts, lora.a_stride // 4 if lora is not None else 0),
        },
        {
            "BF16": x.dtype == "bfloat16",
            "OUT_BF16": y.dtype == "bfloat16",
            "LORA": u is not None,
            "BIAS": False,
            "RESIDUAL": False,
            "ACCUMULATE": accumulate,
            "ROW_COUNT": first_row is not None,
            "DROPOUT": masked,
            "NEEDS_BATCH_INFO": "batch_info" in tensors,
            **expert_constants(experts, tensors),
            **_casts(g, rows),
        },
        flops=2 * x.rows * w.columns * (depth + (u.columns if u is not None else 0)),
        label=label,
    )


def lora_down(
    g: Graph, x: Tensor, lora: Lora, u: Tensor, batch: BatchBuffers, experts: ExpertTiles | None
) -> None:
    """u = scaling · dropout(x)·Aᵀ."""
    x_image, x_unit0 = _units(g, x)
    a_image, a_unit0 = _units(g, lora.a)
    tensors = {"x": x_image, "a": a_image, "u": u}
    if lora.dropout > 0:
        tensors["batch_info"] = batch.info
    ranks = min(2 * _RANKS, ceil_div(lora.r, _RANKS) * _RANKS)
    g.launch(
        "lora/down_image.wgsl",
        (ceil_div(x.rows, 4 * g.profile.image_lanes), ceil_div(lora.r, ranks), 1),
        tensors,
        {
            "rows": x.rows,
            "r": lora.r,
            "k_units": x.units(8),
            "x_unit0": x_unit0,
            "x_stride": x.units(8),
            "a_unit0": a_unit0,
            "a_stride": lora.a.units(8),
            "u_stride": u.stride,
            "scale": lora.scaling,
            **dropout_params(lora),
            **expert_params(experts, lora.a_stride // 8),
        },
        {
            "BF16": x.dtype == "bfloat16",
            "DROPOUT": lora.dropout > 0,
            **expert_constants(experts, tensors),
            **_casts(g, ranks),
        },
        flops=2 * x.rows * x.columns * lora.r,
        label="lora/down",
    )


def lora_up_grad(g: Graph, dy: Tensor, lora: Lora, du: Tensor, experts: ExpertTiles | None) -> None:
    """du = scaling · dy·B."""
    dy_image, dy_unit0 = _units(g, dy)
    b_image, b_unit0 = _units(g, lora.b)
    tensors = {"dy": dy_image, "b": b_image, "du": du}
    g.launch(
        "lora/up_grad_image.wgsl",
        (ceil_div(dy.rows, 2 * g.profile.image_lanes), ceil_div(lora.r, _RANKS), 1),
        tensors,
        {
            "rows": dy.rows,
            "r": lora.r,
            "n": dy.columns,
            "dy_unit0": dy_unit0,
            "dy_stride": dy.units(8),
            "b_unit0": b_unit0,
            "b_stride": lora.b.units(8),
            "du_stride": du.units(4),
            "scale": lora.scaling,
            **expert_params(experts, lora.b_stride // 8),
        },
        {
            "BF16": dy.dtype == "bfloat16",
            **expert_constants(experts, tensors),
            **_casts(g, _RANKS),
        },
        flops=2 * dy.rows * dy.columns * lora.r,
        label="lora/up_grad",
    )


def lora_grad(
    g: Graph,
    x: Tensor,
    u: Tensor,
    gradient: Tensor,
    masked_by: Lora | None,
    batch: BatchBuffers | None,
    expert_rows: Tensor | None,
    expert_stride: int,
) -> None:
    """gradient += xᵀ·u (dB), or with ``masked_by`` its transpose with x masked (dA)."""
    transposed = masked_by is not None
    masked = masked_by is not None and masked_by.dropout > 0
    x_image, x_unit0 = _units(g, x)
    tensors = {"x": x_image, "u": u, "g": gradient}
    if masked and batch is not None:
        tensors["batch_info"] = batch.info
    if expert_rows is not None:
        tensors["expert_rows"] = expert_rows
    lanes = g.profile.image_lanes
    g.launch(
        "lora/grad_image.wgsl",
        (ceil_div(x.columns, 8 * lanes), ceil_div(u.columns, _RANKS), expert_count(expert_rows)),
        tensors,
        {
            "rows": x.rows,
            "x_columns": x.columns,
            "x_unit0": x_unit0,
            "x_stride": x.units(8),
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
            "LANES": lanes,
            "EXPERTS": expert_rows is not None,
        },
        flops=2 * x.rows * x.columns * u.columns,
        label="lora/grad_a" if transposed else "lora/grad_b",
    )


def _tile(wanted: int, rows: int) -> int:
    """Rows of a tile: fewer than wanted where there are few."""
    while wanted > 8 and rows <= wanted // 2:
        wanted //= 2
    return wanted


def _units(g: Graph, x: Tensor) -> tuple[Tensor, int]:
    """An operand's image, and the unit of eight elements that it begins at."""
    image, texel0 = as_image(g, x)
    return image, texel0 // (8 * ITEM_SIZE[x.dtype] // TEXEL)


def _casts(g: Graph, rows: int) -> dict[str, Constant]:
    """How rows that are broadcast are spread over the invocations of a subgroup."""
    span = min(g.profile.image_lanes, rows)
    return {"LANES": g.profile.image_lanes, "SPAN": span, "BLOCKS": rows // span}
