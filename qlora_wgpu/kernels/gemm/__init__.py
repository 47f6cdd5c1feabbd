"""Matrix products: their problem, the variants that solve it, and what a tuner may try."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, Profile
from qlora_wgpu.gpu.matrix import Limits
from qlora_wgpu.kernels.common import Change, Kernel, Tunable
from qlora_wgpu.kernels.gemm.launch import Factors, factors_of, further_layers
from qlora_wgpu.kernels.gemm.matrix_units import MatrixUnits
from qlora_wgpu.kernels.gemm.problem import PART_UNIT, Gemm, LoraTerm, size_class
from qlora_wgpu.kernels.gemm.tiles import (
    Registers,
    Skinny,
    SubgroupTexture,
    WorkgroupTiles,
    broadcast_constants,
    tile_bytes,
)

__all__ = [
    "GEMM",
    "KERNELS",
    "PART_UNIT",
    "TUNABLES",
    "Factors",
    "Gemm",
    "LoraTerm",
    "MatrixUnits",
    "broadcast_constants",
    "factors_of",
    "further_layers",
    "size_class",
]


def _changes(profile: Profile) -> tuple[Change, ...]:
    if profile.textures:
        rows = profile.texture_nt_rows, profile.texture_nn_rows
        nt, nn = (32 if each == 16 else 16 for each in rows)
        return (
            {"texture_nt_rows": nt},
            {"texture_nn_rows": nn},
            {"texture_nt_rows": nt, "texture_nn_rows": nn},
        )
    if profile.name == CPU_PROFILE.name:
        return ({"gemm_tile": 8}, {"gemm_tile": 16, "gemm_group": (16, 1)})
    tried = _MATRIX_CHANGES if profile.matrix else _CHANGES
    changed = ((change, replace(profile, **change)) for change in tried)
    return tuple(change for change, cut in changed if cut != profile and _is_allowed(cut))


_MATRIX_CHANGES: tuple[Change, ...] = (
    {"gemm_kind": "matrix", "matrix_tile": (2, 4, 4, 2), "matrix_deep": True},
    {"gemm_kind": "matrix", "matrix_tile": (2, 2, 4, 4), "matrix_deep": True},
    {"gemm_kind": "matrix", "matrix_tile": (2, 4, 4, 2), "matrix_deep": False},
    {"gemm_kind": "matrix", "matrix_tile": (2, 2, 4, 4), "matrix_deep": False},
    {"gemm_kind": "matrix", "matrix_tile": (2, 2, 2, 2)},
    {"gemm_kind": "matrix", "matrix_tile": (2, 4, 2, 2)},
    {"gemm_kind": "matrix", "matrix_tile": (4, 2, 2, 4)},
    {"gemm_kind": "register"},
    {"gemm_kind": "tiled", "tile_group": (16, 16)},
    {"gemm_kind": "tiled", "tile_group": (8, 8)},
)
_CHANGES: tuple[Change, ...] = (
    {"gemm_kind": "tiled", "tile_group": (16, 16)},
    {"gemm_kind": "tiled", "tile_group": (8, 8)},
    {"gemm_kind": "tiled", "tile_group": (16, 8)},
    {"gemm_kind": "tiled", "tile_group": (8, 16)},
    {"gemm_kind": "tiled", "gemm_few_registers": True},
    {"gemm_kind": "tiled", "gemm_few_registers": False},
    {"gemm_kind": "register", "gemm_tile": 4, "gemm_group": (16, 8)},
    {"gemm_kind": "register", "gemm_tile": 8, "gemm_group": (16, 4)},
    {"gemm_kind": "register", "gemm_tile": 16, "gemm_group": (8, 8)},
)


def _is_allowed(profile: Profile) -> bool:
    """Whether a GPU's workgroups may be as a profile cuts products."""
    if profile.gemm_kind == "matrix":
        tile = profile.tile_on_matrix_units()
        # One that may not be deep is another candidate already.
        fits = all(tile.fits(profile.limits, with_rows=rows) for rows in (True, False))
        return fits and tile.deep == profile.matrix_deep
    if profile.gemm_kind == "tiled":
        across, down = profile.tile_group
        return Limits(across * down, tile_bytes(across, down)).within(profile.limits)
    across, down = profile.gemm_group
    return across * down <= profile.limits.invocations


GEMM: Kernel[Gemm] = Kernel(
    "gemm", (SubgroupTexture(), Skinny(), MatrixUnits(), WorkgroupTiles(), Registers())
)
KERNELS = (GEMM,)
TUNABLES = (Tunable("products", lambda launch: launch.kernel == "gemm", _changes),)
