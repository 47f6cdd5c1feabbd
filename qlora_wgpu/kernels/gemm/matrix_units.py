"""Products on matrix units."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.matrix import MatrixTile
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.common import EXPERT_TILE
from qlora_wgpu.kernels.gemm.launch import Cut, factors_of, launch_split
from qlora_wgpu.kernels.gemm.problem import Gemm

# Half as many workgroups of deep tiles fill a GPU: an H100 is the fastest with one of 256
# invocations on each core. Other GPUs' cores hold several; with so few, some cores would have none.
_DEEP = 2


class MatrixUnits:
    """On matrix units, with float32 sums; factors of f16 are for bfloat16, float32 stays exact."""

    def fits(self, gemm: Gemm, profile: Profile) -> bool:
        """Where the profile has some that take the operands, in a tile within its limits."""
        own = profile.for_products(gemm.size_class)
        if own.gemm_kind != "matrix":
            return False
        takes = own.matrix_element == "f32" or gemm.x.dtype == "bfloat16"
        return takes and _matrix_tile(gemm, own).fits(own.limits, with_rows=gemm.with_rows)

    def launch(self, g: Graph, gemm: Gemm) -> None:
        """Adds the launches."""
        own = g.profile.for_products(gemm.size_class)
        tile = _matrix_tile(gemm, own)
        tensors: dict[str, Tensor] = {}
        if own.saturates:
            factors = factors_of(g, gemm, tile.rows)
            if factors.exponents is not None:
                tensors["exponents"] = factors.exponents
            elif g.saturated is not None and gemm.w.dtype != "float16":
                tensors["saturated"] = g.saturated
            gemm = _with_factors(gemm, factors.x)
        constants = tile.constants(with_rows=gemm.with_rows)
        # A term that is masked is added to the results.
        term = gemm.lora is not None and gemm.lora.dropout is None
        whole = _in_whole_tiles(gemm, tile)
        constants |= {
            "TERM": term,
            "SIZED_PARTS": gemm.part > 0,
            "WHOLE_K": whole,
            "RUNS": whole and (gemm.with_rows or not gemm.others),
        }
        cut = Cut(
            f"gemm/{gemm.name}_tiled.wgsl", tile.rows, tile.columns, constants,
            threads=(_DEEP if tile.deep else 1) * tile.invocations, any_parts=True, tensors=tensors,
            direct=term or gemm.lora is None,
            loads=gemm.scale == 1.0 and "exponents" not in tensors,
        )  # fmt: skip
        launch_split(g, gemm, cut)


def _with_factors(gemm: Gemm, x: Tensor) -> Gemm:
    """The product of a copy of x that has its columns alone, of all layers side by side."""
    return replace(gemm, x=x) if gemm.with_rows else replace(gemm, x=x, row0=0, others=())


def _matrix_tile(gemm: Gemm, profile: Profile) -> MatrixTile:
    tile = profile.tile_on_matrix_units()
    if gemm.experts is None:
        return tile
    return tile.of_rows(EXPERT_TILE).within(profile.limits)


def _in_whole_tiles(gemm: Gemm, tile: MatrixTile) -> bool:
    """Whether tiles along the sums end where those and their parts do, each of one layer's x."""
    layers = () if gemm.with_rows else (gemm.x, *gemm.others)[: len(gemm.others)]
    lengths = (gemm.depth, gemm.part, *(x.columns for x in layers))
    return all(length % tile.depth == 0 for length in lengths)
