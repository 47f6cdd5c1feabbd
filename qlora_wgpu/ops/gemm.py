"""The two matrix products: rows with rows (``nt``) and rows with columns (``nn``)."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.experts import ExpertTiles
from qlora_wgpu.kernels.gemm import GEMM, Gemm, LoraTerm
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.ops.batch import BatchBuffers


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
    batch: BatchBuffers | None = None,
    first_row: int | None = None,
    experts: ExpertTiles | None = None,
    label: str = "",
) -> None:
    """Computes y[:, row0 : row0 + w.rows] = scale · x·wᵀ + u·bᵀ + bias + residual.

    Args:
        g: The graph.
        x: (rows, K).
        w: (columns, K).
        y: (rows, ·), overwritten in those columns.
        row0: First row of ``w`` within the whole matrix; a multiple of eight.
        scale: Factor of the product alone.
        lora: The adapter, whose ``b`` is multiplied with ``u``.
        u: (rows, r) float32.
        bias: The bias of the whole matrix.
        residual: Added to the result; laid out as y is.
        batch: Needed for ``first_row``.
        first_row: If given, x is a chunk of the compacted label rows, from this one on.
        experts: If given, ``w`` holds the matrices of some experts, one below the other, and each
            tile of rows meets its own; tiles of others are left alone.
        label: For timing tables.

    Raises:
        GraphError: If shapes do not fit.
    """
    term = None
    if lora is not None and u is not None:
        term = LoraTerm(u, lora.b, lora.b_stride)
    GEMM.launch(
        g,
        Gemm(
            x=x, w=w, y=y, with_rows=True, row0=row0, scale=scale, lora=term, bias=bias,
            residual=residual, batch_info=batch.info if batch else None,
            first_row=first_row, experts=experts, label=label,
        ),
    )  # fmt: skip


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
        x: (rows, ·).
        w: (K, columns).
        y: (rows, columns).
        row0: First column of ``x`` that meets ``w``; a multiple of eight.
        accumulate: Whether to add to y, which is float32 then.
        scale: Factor of the product with ``w`` alone.
        lora: The adapter, whose ``a`` is multiplied with ``u`` and whose dropout mask the product
            gets.
        u: (rows, r) float32.
        batch: Needed for dropout and for ``first_row``.
        first_row: If given, x is a chunk of the compacted label rows, from this one on.
        experts: If given, ``w`` holds the matrices of some experts, one below the other, and each
            tile of rows meets its own; tiles of others are left alone.
        label: For timing tables.

    Raises:
        GraphError: If shapes do not fit.
    """
    term = None
    if lora is not None and u is not None:
        term = LoraTerm(u, lora.a, lora.a_stride)
    GEMM.launch(
        g,
        Gemm(
            x=x, w=w, y=y, with_rows=False, row0=row0, scale=scale, accumulate=accumulate,
            lora=term, dropout=lora.mask if lora and term else None,
            batch_info=batch.info if batch else None, first_row=first_row, experts=experts,
            label=label,
        ),
    )  # fmt: skip
