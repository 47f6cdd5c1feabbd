"""Products whose results each invocation holds in registers, from buffers or from textures."""

from __future__ import annotations

from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.kernels.gemm.launching import Cut, launch_split, launch_whole
from qlora_wgpu.kernels.gemm.problem import Gemm

_ROWS_THAT_JUST_FIT = 10
SKINNY = 64  # products of at most so many columns are cut along their rows instead


class SubgroupTexture:
    """For software adapters: operands in textures, rows broadcast within a subgroup."""

    def fits(self, gemm: Gemm, profile: Profile) -> bool:
        """Where kernels read textures; they mask the term, not x."""
        return profile.textures and gemm.dropout is None and not gemm.others

    def launch(self, g: Graph, gemm: Gemm) -> None:
        """Adds the launch."""
        threads = g.profile.subgroup_size
        most = g.profile.texture_nt_rows if gemm.with_rows else g.profile.texture_nn_rows
        rows = _fewer(most, gemm.x.rows, whole=gemm.experts is not None)
        path = f"gemm/{gemm.name}_texture.wgsl"
        tile = 8 * threads
        left = gemm.columns % tile
        constants: dict[str, Constant] = {
            **broadcast_constants(threads, rows),
            # Of a product of less than a tile it would save little, and takes longer to compile. A
            # loop over 32 rows is too long to be there twice.
            "NARROW": most <= 16 and gemm.columns > tile and 0 < left <= tile // 2,
            # A loop over ten rows just fits into what a processor keeps decoded, so that every
            # instruction counts; other loops stay as they were timed.
            "WHOLE_K": rows == _ROWS_THAT_JUST_FIT and gemm.depth % 8 == 0,
        }
        launch_whole(g, gemm, Cut(path, rows, tile, constants, True, eights=True))


class Skinny:
    """For results of few columns, or a masked x: each invocation has a few rows."""

    def fits(self, gemm: Gemm, profile: Profile) -> bool:
        """Where there are few columns, as a LoRA rank."""
        return gemm.cut_columns <= SKINNY or gemm.dropout is not None

    def launch(self, g: Graph, gemm: Gemm) -> None:
        """Adds the launches."""
        launch_split(g, gemm, _registers(gemm, g.profile.skinny_tile, *g.profile.skinny_group))


class Registers:
    """Each invocation holds a tile of results; no workgroup memory."""

    def fits(self, gemm: Gemm, profile: Profile) -> bool:
        """Everywhere."""
        return True

    def launch(self, g: Graph, gemm: Gemm) -> None:
        """Adds the launches."""
        own = g.profile.for_products(gemm.size_class)
        launch_split(g, gemm, _registers(gemm, own.gemm_tile, *own.gemm_group))


def _registers(gemm: Gemm, tile: int, across: int, down: int) -> Cut:
    constants: dict[str, Constant] = {"TILE_M": tile, "WG_N": across, "WG_M": down}
    return Cut(f"gemm/{gemm.name}.wgsl", tile * down, 8 * across, constants)


def _fewer(rows: int, present: int, *, whole: bool) -> int:
    """Rows of a tile: fewer where there are few.

    Args:
        rows: At most.
        present: Those of the results.
        whole: Whether tiles must be whole parts of an expert's.
    """
    # A tile of ten rows takes some 8/7 of the time of one of eight.
    eights, tens = ceil_div(present, 8), ceil_div(present, _ROWS_THAT_JUST_FIT)
    if rows == _ROWS_THAT_JUST_FIT and (whole or 8 * tens >= 7 * eights):
        rows = 8
    while rows > 8 and present <= rows // 2:
        rows //= 2
    return rows


def broadcast_constants(subgroup_size: int, rows: int) -> dict[str, Constant]:
    """How rows that are broadcast are spread over the invocations of a subgroup."""
    span = max(n for n in range(1, min(subgroup_size, rows) + 1) if rows % n == 0)
    return {"THREADS": subgroup_size, "SPAN": span, "BLOCKS": rows // span}
