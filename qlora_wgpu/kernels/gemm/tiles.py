"""Products through workgroup memory."""

from __future__ import annotations

from qlora_wgpu.gpu.matrix import Limits
from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.kernels.experts import EXPERT_TILE
from qlora_wgpu.kernels.gemm.launching import LEAST_PART, Cut, launch_split
from qlora_wgpu.kernels.gemm.problem import Gemm

_TILE_DEPTH, _LEAST_TILE = 16, 8  # of common/tile_f32.wgsl: along k; invocations along a side


class WorkgroupTiles:
    """For GPUs: tiles of both operands pass through workgroup memory."""

    def fits(self, gemm: Gemm, profile: Profile) -> bool:
        """Where the profile asks for it, also in place of matrix units that do not fit."""
        own = profile.for_products(gemm.size_class)
        across, down = own.tile_group
        if own.gemm_kind not in ("tiled", "matrix"):
            return False
        return Limits(across * down, tile_bytes(across, down)).within(own.limits)

    def launch(self, g: Graph, gemm: Gemm) -> None:
        """Adds the launches."""
        own = g.profile.for_products(gemm.size_class)
        across, down = _tile_group(own, gemm)
        constants: dict[str, Constant] = {
            "MATRIX": False,
            "HALF": False,
            "WG_M": down,
            "WG_N": across,
            "GROUP": across * down,
            "W_ROWS": gemm.with_rows,
            "HOLDS_W": own.gemm_few_registers and not gemm.with_rows,
            "X_UNITS": _TILE_DEPTH // across,
            "W_UNITS": _TILE_DEPTH // down,
        }
        path, threads = f"gemm/{gemm.name}_tiled.wgsl", across * down
        launch_split(
            g, gemm, Cut(path, 8 * down, 8 * across, constants, threads=threads, any_parts=True)
        )


def _tile_group(profile: Profile, gemm: Gemm) -> tuple[int, int]:
    """The largest workgroup that has no idle half, and of which there are enough for all cores.

    Large tiles read less; cutting the reduction, if it is long, makes more workgroups of them.
    """
    across, down = profile.tile_group
    if gemm.experts is not None:
        down = min(down, EXPERT_TILE // 8)
    parts = gemm.parts if gemm.part else max(gemm.depth // LEAST_PART, 1)
    while max(across, down) > _LEAST_TILE:
        workgroups = ceil_div(gemm.x.rows, 8 * down) * ceil_div(gemm.cut_columns, 8 * across)
        few = workgroups * parts < profile.least_workgroups // 8
        if down > _LEAST_TILE and (gemm.x.rows <= 4 * down or (few and down >= across)):
            down //= 2
        elif across > _LEAST_TILE and (gemm.cut_columns <= 4 * across or few):
            across //= 2
        else:
            break
    return across, down


def tile_bytes(across: int, down: int) -> int:
    """Workgroup memory of ``common/tile_f32.wgsl``: eight rows and columns each, 16 deep."""
    return 4 * 16 * 8 * (across + down)
