"""Copies in f16 of what products on matrix units multiply, which each tile had to convert."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor, matrix
from qlora_wgpu.kernels.experts import expert_constants, expert_params
from qlora_wgpu.kernels.gemm.launching import further_layers
from qlora_wgpu.kernels.gemm.problem import Gemm

SIZED_ROWS = 8  # of a workgroup, which loads all of them at once
_GROUP = 256  # invocations of it, each with one unit of eight


@dataclass(frozen=True)
class Factors:
    """A product's x for matrix units.

    Attributes:
        x: (rows, depth) float16.
        exponents: What it is multiplied by, if it is scaled: for each part of the reduction and
            each tile of rows the exponent of a power of two, as float32 has it.
    """

    x: Tensor
    exponents: Tensor | None


def factors_of(g: Graph, gemm: Gemm, tile_rows: int) -> Factors:
    """x as f16; scaled where it is a gradient, that is in a product with columns.

    Args:
        g: The graph.
        gemm: The product.
        tile_rows: Rows that share a power of two, a multiple of ``SIZED_ROWS``.

    Raises:
        GraphError: If they are none.
    """
    if tile_rows % SIZED_ROWS:
        raise GraphError(f"gemm: tiles of {tile_rows} rows are not in whole {SIZED_ROWS}s")
    x, depth = gemm.x, gemm.depth
    made = matrix(f"{x.name} in f16", x.rows, depth, "float16")
    units = made.units(8)
    part = gemm.part // 8 or units
    blocks, chunks = ceil_div(x.rows, SIZED_ROWS), ceil_div(part, _GROUP)
    others, layers = ({}, {}) if gemm.with_rows else further_layers("x", x, gemm.others, 8, 8)
    count = gemm.batch_info if gemm.first_row is not None else None
    tensors: dict[str, Tensor | None] = {"x": x, **others, "batch_info": count}
    params = {
        "rows": x.rows,
        "units": units,
        "part": part,
        "blocks": blocks,
        "chunks": chunks,
        "x_stride": x.units(8),
        "x_unit0": 0 if gemm.with_rows else gemm.row0 // 8,
        "first_row": gemm.first_row or 0,
        "begin1": 0,
        "begin2": 0,
        "stride1": 0,
        "stride2": 0,
        **layers,
        **expert_params(gemm.experts, 0),
    }
    constants = {"GROUP": _GROUP, "ROWS": SIZED_ROWS}
    workgroups = (blocks, chunks, gemm.parts)
    found: dict[str, Tensor | None] = {}
    if not gemm.with_rows:
        sizes = g.integers(f"sizes of {x.name}", blocks * chunks * gemm.parts)
        g.launch(
            "gemm/sizes.wgsl", workgroups, {**tensors, "sizes": sizes}, params, constants,
            label=gemm.label,
        )  # fmt: skip
        tiles = ceil_div(x.rows, tile_rows)
        exponents = g.integers(f"exponents of {x.name}", tiles * gemm.parts)
        found = {"sizes": sizes, "exponents": exponents}
    elif g.saturated is not None:
        found = {"saturated": g.saturated}
    tensors |= {"factors": made, **found}
    own = {"TILE_ROWS": tile_rows, **constants, **expert_constants(gemm.experts, tensors)}
    g.launch("gemm/factors.wgsl", workgroups, tensors, params, own, label=gemm.label)
    return Factors(made, found.get("exponents"))
