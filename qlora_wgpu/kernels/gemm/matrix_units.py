"""Products on matrix units."""

from __future__ import annotations

from qlora_wgpu.gpu.matrix import MatrixTile
from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.experts import EXPERT_TILE
from qlora_wgpu.kernels.gemm.launching import Cut, further_layers, launch_split
from qlora_wgpu.kernels.gemm.problem import Gemm

SIZED_ROWS = 8  # share an entry of what says how large gradients are
_SIZING_GROUP = 128  # invocations that look for it


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
        constants = tile.constants(with_rows=gemm.with_rows)
        # A term that is masked is added to the results.
        term = gemm.lora is not None and gemm.lora.dropout is None
        constants |= {
            "TERM": term,
            "SIZED_PARTS": gemm.part > 0,
            "BFLOAT16": gemm.x.dtype == "bfloat16",
            "WHOLE_K": _in_whole_tiles(gemm, tile),
        }
        tensors: dict[str, Tensor] = {}
        if own.saturates and not gemm.with_rows:
            tensors["sizes"] = largest_sizes(g, gemm)
            constants["SIZED_ROWS"] = SIZED_ROWS
        elif own.saturates and g.saturated is not None:
            tensors["saturated"] = g.saturated
        cut = Cut(
            f"gemm/{gemm.name}_tiled.wgsl", tile.rows, tile.columns, constants,
            threads=tile.invocations, any_parts=True, tensors=tensors,
            direct=term or gemm.lora is None, loads=gemm.scale == 1.0 and "sizes" not in tensors,
        )  # fmt: skip
        launch_split(g, gemm, cut)


def _matrix_tile(gemm: Gemm, profile: Profile) -> MatrixTile:
    tile = profile.tile_on_matrix_units()
    return tile if gemm.experts is None else tile.of_rows(EXPERT_TILE)


def _in_whole_tiles(gemm: Gemm, tile: MatrixTile) -> bool:
    """Whether tiles along the sums end where those and their parts do, each of one layer's x."""
    layers = () if gemm.with_rows else (gemm.x, *gemm.others)[: len(gemm.others)]
    lengths = (gemm.depth, gemm.part, *(x.columns for x in layers))
    return all(length % tile.depth == 0 for length in lengths)


def largest_sizes(g: Graph, gemm: Gemm) -> Tensor:
    """How large a product's x is at most, for each ``SIZED_ROWS`` of its rows: float32's bits.

    Where its parts are given, for those of the first part, then of the second and so on.
    """
    x = gemm.x
    blocks = ceil_div(x.rows, SIZED_ROWS)
    sizes = g.integers(f"sizes of {x.name}", gemm.parts * blocks)
    batch_info = gemm.batch_info if gemm.first_row is not None else None
    others, layers = further_layers("x", x, gemm.others, 8, 8)
    g.launch(
        "gemm/sizes.wgsl",
        (blocks, gemm.parts, 1),
        {"x": x, **others, "sizes": sizes, "batch_info": batch_info},
        {
            "rows": x.rows,
            "stride": x.units(8),
            "first_row": gemm.first_row or 0,
            "stride1": layers["stride1"],
            "stride2": layers["stride2"],
            "part": gemm.part // 8,
        },
        {"GROUP": _SIZING_GROUP, "ROWS": SIZED_ROWS, "PARTS": gemm.part > 0},
        label=gemm.label,
    )
    return sizes
