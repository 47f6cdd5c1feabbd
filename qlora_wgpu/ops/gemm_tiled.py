"""How matrix products are cut on GPUs, where tiles pass through a workgroup's memory."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor

_LEAST_PART = 1024  # of a reduction that is cut, so that adding up the parts stays cheap
_GRADIENT_SCALE = 64.0  # lifts gradients into f16's range, where 0 is below 6e-8


@dataclass(frozen=True)
class Tiling:
    """A product's kernel and how many results its workgroups make.

    Attributes:
        path: The shader.
        rows: Of results a workgroup makes.
        columns: Of results a workgroup makes.
        constants: Of the shader, besides those that all products have.
    """

    path: str
    rows: int
    columns: int
    constants: dict[str, Constant]


def tiling(g: Graph, name: str, x: Tensor, most_rows: int | None = None) -> Tiling:
    """Chooses the kernel of a product.

    Args:
        g: The graph, whose profile says what the adapter likes.
        name: ``"nt"`` or ``"nn"``.
        x: The operand; matrix units are for bfloat16 only, float32 stays exact.
        most_rows: That a workgroup may make, a power of two, if there is a limit.
    """
    profile = g.profile
    if profile.gemm_kind == "matrix" and x.dtype == "bfloat16":
        m, n, k, lanes = profile.matrix
        groups_m, groups_n, fragments_m, fragments_n = profile.matrix_tile
        while most_rows and groups_m * fragments_m * m > most_rows and groups_m > 1:
            groups_m, groups_n = groups_m // 2, groups_n * 2
        while most_rows and groups_m * fragments_m * m > most_rows:
            fragments_m //= 2
        return Tiling(
            f"gemm/{name}_tiled.wgsl",
            groups_m * fragments_m * m,
            groups_n * fragments_n * n,
            {
                "MATRIX": True,
                "MATRIX_M": m,
                "MATRIX_N": n,
                "MATRIX_K": k,
                "LANES": lanes,
                "GROUP": groups_m * groups_n * lanes,
                "GROUPS_M": groups_m,
                "GROUPS_N": groups_n,
                "FRAGMENTS_M": fragments_m,
                "FRAGMENTS_N": fragments_n,
                "W_ROWS": name == "nt",
                "X_SCALE": _GRADIENT_SCALE if name == "nn" else 1.0,
            },
        )
    if profile.gemm_kind == "register":
        across, down = profile.gemm_group
        return register_tiling(name, profile.gemm_tile, across, down)
    across, down = profile.tile_group
    if most_rows:
        down = min(down, most_rows // 8)
    return Tiling(
        f"gemm/{name}_tiled.wgsl",
        8 * down,
        8 * across,
        {"MATRIX": False, "WG_M": down, "WG_N": across, "GROUP": across * down},
    )


def register_tiling(name: str, tile: int, across: int, down: int) -> Tiling:
    """The kernels whose invocations each hold tile × 8 results, without workgroup memory."""
    return Tiling(
        f"gemm/{name}.wgsl",
        tile * down,
        8 * across,
        {"TILE_M": tile, "WG_N": across, "WG_M": down},
    )


def parts_of(g: Graph, tiling: Tiling, rows: int, columns: int, depth: int) -> tuple[int, int]:
    """Cuts a long reduction of few results, which would leave a GPU idle.

    Returns:
        How many parts, and how deep each is, a multiple of 64.
    """
    workgroups = -(-rows // tiling.rows) * -(-columns // tiling.columns)
    wanted = min(g.profile.least_workgroups // workgroups, depth // _LEAST_PART)
    part = -(-depth // max(wanted, 1))
    part = -(-part // 64) * 64
    return -(-depth // part), part
