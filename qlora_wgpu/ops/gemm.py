"""Launchers of the two matrix products: rows with rows (``nt``) and rows with columns (``nn``)."""

from __future__ import annotations

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops import gemm_image
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.dropout import dropout_params
from qlora_wgpu.ops.expert_kernels import expert_constants, expert_params
from qlora_wgpu.ops.gemm_tiled import Tiling, parts_of, register_tiling, tiling
from qlora_wgpu.ops.modules import EXPERT_TILE, ExpertTiles, Lora
from qlora_wgpu.ops.tensor import sum_parts

THIN = 64  # products of at most so many columns are cut along their rows instead


def nt(
    g: Graph,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    row0: int = 0,
    scale: float = 1.0,
    lora: Lora | None = None,
    u: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dropout: Lora | None = None,
    batch: BatchBuffers | None = None,
    first_row: int | None = None,
    experts: ExpertTiles | None = None,
    label: str = "",
) -> None:
    """Computes y[:, row0 : row0 + w.rows] = scale · x·wᵀ + u·bᵀ + bias + residual.

    Args:
        g: The graph.
        x: (rows, K) operand.
        w: (columns, K) operand, or float32.
        y: (rows, ·) operand or float32, overwritten in those columns.
        row0: First row of ``w`` within the whole matrix; a multiple of eight.
        scale: Of the product alone.
        lora: Whose ``b`` is multiplied with ``u``.
        u: (rows, r) float32.
        bias: Of the whole matrix.
        residual: (rows, ·) float32, of y's layout.
        dropout: The adapter whose mask x gets, if any.
        batch: Needed for dropout and for ``first_row``.
        first_row: If given, x is a chunk of the compacted label rows, from this one on.
        experts: If given, ``w`` holds the matrices of some experts, one below the other, and each
            tile of rows meets its own; tiles of others are left alone.
        label: For timing tables.
    """
    if x.columns != w.columns:
        raise GraphError(f"gemm: {x} and {w} differ in their columns")
    if gemm_image.usable(g):
        gemm_image.nt(
            g, x, w, y, row0=row0, scale=scale, lora=lora, u=u, bias=bias, residual=residual,
            batch=batch, first_row=first_row, experts=experts, label=label,
        )  # fmt: skip
        return
    tensors = {"x": x, "w": w, "y": y}
    if u is not None and lora is not None:
        tensors |= {"u": u, "b": lora.b}
    if bias is not None:
        tensors["bias"] = bias
    if residual is not None:
        tensors["residual"] = residual
    masked = dropout is not None and dropout.dropout > 0
    if masked or first_row is not None:
        tensors["batch_info"] = _batch_info(batch)
    columns = w.rows // (experts.count if experts is not None else 1)
    _launch(
        g,
        _tiling(g, "nt", x, columns, masked=masked, experts=experts is not None),
        tensors,
        {
            "rows": x.rows,
            "columns": columns,
            "k_units": x.units(8),
            "x_stride": x.units(8),
            "w_stride": w.units(8),
            "y_stride": y.units(4),
            "y_unit0": row0 // 4,
            "first_row": first_row or 0,
            "r_units": ceil_div(u.columns, 4) if u is not None else 0,
            "r_stride": u.units(4) if u is not None else 0,
            "scale": scale,
            **dropout_params(dropout),
            "w_expert": columns * w.units(8),
            **expert_params(experts, lora.b_stride // 4 if lora is not None else 0),
        },
        {
            "LORA": u is not None,
            "BIAS": bias is not None,
            "RESIDUAL": residual is not None,
            "ACCUMULATE": False,
            "ROW_COUNT": first_row is not None,
            "DROPOUT": masked,
        },
        x.columns,
        label,
        experts=experts,
    )


def nn(
    g: Graph,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *,
    row0: int = 0,
    accumulate: bool = False,
    scale: float = 1.0,
    lora: Lora | None = None,
    u: Tensor | None = None,
    batch: BatchBuffers | None = None,
    first_row: int | None = None,
    experts: ExpertTiles | None = None,
    label: str = "",
) -> None:
    """Computes y (+)= scale · x[:, row0 : row0 + w.rows]·w + mask · u·a.

    Args:
        g: The graph.
        x: (rows, ·) operand.
        w: (K, columns) operand, or float32.
        y: (rows, columns) operand or float32.
        row0: First column of ``x`` that meets ``w``; a multiple of eight.
        accumulate: Whether to add to y, which is float32 then.
        scale: Of the product with ``w`` alone.
        lora: Whose ``a`` is multiplied with ``u``, and whose dropout mask the product gets.
        u: (rows, r) float32.
        batch: Needed for dropout and for ``first_row``.
        first_row: If given, x is a chunk of the compacted label rows, from this one on.
        experts: If given, ``w`` holds the matrices of some experts, one below the other, and each
            tile of rows meets its own; tiles of others are left alone.
        label: For timing tables.
    """
    if y.columns != w.columns:
        raise GraphError(f"gemm: {y} and {w} differ in their columns")
    if accumulate and y.dtype != "float32":
        raise GraphError(f"gemm: {y} cannot be added to, it is no float32")
    if gemm_image.usable(g):
        gemm_image.nn(
            g, x, w, y, row0=row0, accumulate=accumulate, scale=scale, lora=lora, u=u,
            batch=batch, first_row=first_row, experts=experts, label=label,
        )  # fmt: skip
        return
    tensors = {"x": x, "w": w, "y": y}
    if u is not None and lora is not None:
        tensors |= {"u": u, "a": lora.a}
    masked = lora is not None and lora.dropout > 0
    if masked or first_row is not None:
        tensors["batch_info"] = _batch_info(batch)
    depth = w.rows // (experts.count if experts is not None else 1)
    tiled = _tiling(g, "nn", x, w.columns, experts=experts is not None)
    parts, part = 1, depth + -depth % 64
    if y.dtype == "float32" and u is None and experts is None:
        parts, part = parts_of(g, tiled, x.rows, w.columns, depth)
    if parts > 1:
        tensors["y"] = g.float32(f"parts of {y.name}", parts * y.rows, y.columns)
    _launch(
        g,
        tiled,
        tensors,
        {
            "rows": x.rows,
            "columns": w.columns,
            "k": depth,
            "k_part": part,
            "x_stride": x.units(8),
            "x_unit0": row0 // 8,
            "w_stride": w.units(8),
            "y_stride": y.units(4),
            "y_unit0": 0,
            "first_row": first_row or 0,
            "r": u.columns if u is not None else 0,
            "r_stride": u.stride if u is not None else 0,
            "scale": scale,
            **dropout_params(lora),
            "w_expert": depth * w.units(8),
            **expert_params(experts, lora.a_stride // 4 if lora is not None else 0),
        },
        {
            "LORA": u is not None,
            "BIAS": False,
            "RESIDUAL": False,
            "ACCUMULATE": accumulate and parts == 1,
            "ROW_COUNT": first_row is not None,
            "DROPOUT": masked,
        },
        depth,
        label,
        parts,
        experts,
    )
    if parts > 1:
        sum_parts(g, tensors["y"], y, parts, accumulate=accumulate)


def _launch(
    g: Graph,
    tiling: Tiling,
    tensors: dict[str, Tensor],
    params: dict[str, int | float],
    flags: dict[str, Constant],
    depth: int,
    label: str,
    parts: int = 1,
    experts: ExpertTiles | None = None,
) -> None:
    x, w, y = tensors["x"], tensors["w"], tensors["y"]
    columns = int(params["columns"])
    constants: dict[str, Constant] = {
        "BF16": x.dtype == "bfloat16",
        "W_FLOAT": w.dtype == "float32",
        "OUT_BF16": y.dtype == "bfloat16",
        "NEEDS_BATCH_INFO": "batch_info" in tensors,
        **expert_constants(experts, tensors),
        **tiling.constants,
        **flags,
    }
    rank = tensors["u"].columns if "u" in tensors else 0
    g.launch(
        tiling.path,
        (ceil_div(columns, tiling.columns), ceil_div(x.rows, tiling.rows), parts),
        tensors,
        params,
        constants,
        flops=2 * x.rows * columns * (depth + rank),
        label=label,
    )


def _tiling(
    g: Graph, name: str, x: Tensor, columns: int, *, masked: bool = False, experts: bool = False
) -> Tiling:
    if columns <= THIN or masked:
        return register_tiling(name, g.profile.thin_tile, *g.profile.thin_group)
    return tiling(g, name, x, EXPERT_TILE if experts else None)


def _batch_info(batch: BatchBuffers | None) -> Tensor:
    if batch is None:
        raise GraphError("gemm: dropout and row counts need the batch")
    return batch.info
