"""Products of many rows: on matrix units, through workgroup memory, or held in registers."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.matrix import Limits, MatrixTile
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, ceil_div
from qlora_wgpu.kernels.common import EXPERT_TILE, Change, Tunable
from qlora_wgpu.kernels.gemm.launch import (
    LEAST_PART,
    Tiling,
    factors_of,
    launch_split,
    launch_whole,
)
from qlora_wgpu.kernels.gemm.problem import Gemm

# Half as many workgroups of deep tiles fill a GPU: an H100 is fastest with one of 256 invocations
# per core. Other GPUs' cores hold several; with so few, some cores would be idle.
_DEEP = 2


def matrix_units_fits(gemm: Gemm, profile: Profile) -> bool:
    """Whether the profile has matrix units for the operands, with a tile within its limits."""
    own = profile.for_products(gemm.size_class)
    if own.gemm_kind != "matrix":
        return False
    takes = own.matrix_element == "f32" or gemm.x.dtype == "bfloat16"
    return takes and _matrix_tile(gemm, own).fits(own.limits, with_rows=gemm.with_rows)


def matrix_units(g: Graph, gemm: Gemm) -> None:
    """On matrix units, with float32 sums; f16 is used for bfloat16, float32 stays exact."""
    own = g.profile.for_products(gemm.size_class)
    tile = _matrix_tile(gemm, own)
    tensors: dict[str, Tensor] = {}
    if own.saturates:
        factors = factors_of(g, gemm, tile.rows)
        if factors.exponents is not None:
            tensors["exponents"] = factors.exponents
        elif g.saturated is not None and gemm.dense.dtype != "float16":
            tensors["saturated"] = g.saturated
        gemm = _with_factors(gemm, factors.x)
    constants = tile.constants(with_rows=gemm.with_rows)
    # A masked term is added to the results.
    term = gemm.lora is not None and gemm.lora.dropout is None
    whole = _in_whole_tiles(gemm, tile)
    constants |= {
        "TERM": term,
        "SIZED_PARTS": gemm.part > 0,
        "WHOLE_K": whole,
        "RUNS": whole and (gemm.with_rows or not gemm.others),
    }
    tiling = Tiling(
        f"gemm/{gemm.name}_tiled.wgsl", tile.rows, tile.columns, constants,
        threads=(_DEEP if tile.deep else 1) * tile.invocations, any_parts=True, tensors=tensors,
        direct=term or gemm.lora is None,
        loads=gemm.scale == 1.0 and "exponents" not in tensors,
    )  # fmt: skip
    launch_split(g, gemm, tiling)


def _with_factors(gemm: Gemm, x: Tensor) -> Gemm:
    """The product with a copy of x with only its columns, all layers next to each other."""
    return replace(gemm, x=x) if gemm.with_rows else replace(gemm, x=x, row0=0, others=())


def _matrix_tile(gemm: Gemm, profile: Profile) -> MatrixTile:
    tile = profile.tile_on_matrix_units()
    if gemm.experts is None:
        return tile
    return tile.of_rows(EXPERT_TILE).within(profile.limits)


def _in_whole_tiles(gemm: Gemm, tile: MatrixTile) -> bool:
    """Whether tiles along the reduction end where it, its parts and each layer's x end."""
    layers = () if gemm.with_rows else (gemm.x, *gemm.others)[: len(gemm.others)]
    lengths = (gemm.depth, gemm.part, *(x.columns for x in layers))
    return all(length % tile.depth == 0 for length in lengths)


_TILE_DEPTH, _LEAST_TILE = 16, 8  # of common/tile_f32.wgsl: along k; invocations along a side


def workgroup_tiles_fits(gemm: Gemm, profile: Profile) -> bool:
    """Whether the profile asks for it, also if matrix units do not fit."""
    own = profile.for_products(gemm.size_class)
    across, down = own.tile_group
    if own.gemm_kind not in ("tiled", "matrix"):
        return False
    return Limits(across * down, tile_bytes(across, down)).within(own.limits)


def workgroup_tiles(g: Graph, gemm: Gemm) -> None:
    """For GPUs: tiles of both operands in workgroup memory."""
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
        g, gemm, Tiling(path, 8 * down, 8 * across, constants, threads=threads, any_parts=True)
    )


def _tile_group(profile: Profile, gemm: Gemm) -> tuple[int, int]:
    """The largest workgroup without an idle half, if there are enough for all cores.

    Large tiles read less; splitting a long reduction makes more workgroups of them.
    """
    across, down = profile.tile_group
    if gemm.experts is not None:
        down = min(down, EXPERT_TILE // 8)
    parts = gemm.parts if gemm.part else max(gemm.depth // LEAST_PART, 1)
    while max(across, down) > _LEAST_TILE:
        workgroups = ceil_div(gemm.x.rows, 8 * down) * ceil_div(gemm.tiling_columns, 8 * across)
        few = workgroups * parts < profile.least_workgroups // 8
        if down > _LEAST_TILE and (gemm.x.rows <= 4 * down or (few and down >= across)):
            down //= 2
        elif across > _LEAST_TILE and (gemm.tiling_columns <= 4 * across or few):
            across //= 2
        else:
            break
    return across, down


def tile_bytes(across: int, down: int) -> int:
    """Workgroup memory of ``common/tile_f32.wgsl``: eight rows and columns each, depth 16."""
    return 4 * 16 * 8 * (across + down)


_ROWS_THAT_JUST_FIT = 10
SKINNY = 64  # products of at most this many columns are split along rows instead


def texture_fits(gemm: Gemm, profile: Profile) -> bool:
    """Whether kernels read textures; they can mask the term, but not x."""
    return profile.textures and gemm.dropout is None and not gemm.others


def subgroup_texture(g: Graph, gemm: Gemm) -> None:
    """For software GPUs: operands in textures, rows broadcast within a subgroup."""
    threads = g.profile.subgroup_size
    most = g.profile.texture_nt_rows if gemm.with_rows else g.profile.texture_nn_rows
    rows = _fewer(most, gemm.x.rows, whole=gemm.experts is not None)
    path = f"gemm/{gemm.name}_texture.wgsl"
    tile = 8 * threads
    left = gemm.columns % tile
    constants: dict[str, Constant] = {
        **broadcast_constants(threads, rows),
        # For products of less than a tile it saves little and takes longer to compile. A loop over
        # 32 rows is too long to appear twice.
        "NARROW": most <= 16 and gemm.columns > tile and 0 < left <= tile // 2,
        # A loop over ten rows just fits a processor's cache of decoded instructions, so every
        # instruction counts; other loops stay as timed.
        "WHOLE_K": rows == _ROWS_THAT_JUST_FIT and gemm.depth % 8 == 0,
    }
    launch_whole(g, gemm, Tiling(path, rows, tile, constants, True, eights=True))


def skinny(g: Graph, gemm: Gemm) -> None:
    """For few columns, or a masked x: each invocation has a few rows."""
    launch_split(g, gemm, _registers(gemm, g.profile.skinny_tile, *g.profile.skinny_group))


def registers(g: Graph, gemm: Gemm) -> None:
    """Each invocation holds a tile of results, without workgroup memory."""
    own = g.profile.for_products(gemm.size_class)
    launch_split(g, gemm, _registers(gemm, own.gemm_tile, *own.gemm_group))


def _registers(gemm: Gemm, tile: int, across: int, down: int) -> Tiling:
    constants: dict[str, Constant] = {"TILE_M": tile, "WG_N": across, "WG_M": down}
    return Tiling(f"gemm/{gemm.name}.wgsl", tile * down, 8 * across, constants)


def _fewer(rows: int, present: int, *, whole: bool) -> int:
    """Rows of a tile, fewer if few are present; ``whole``: tiles must divide an expert's."""
    # A tile of ten rows takes about 8/7 of the time of one of eight.
    eights, tens = ceil_div(present, 8), ceil_div(present, _ROWS_THAT_JUST_FIT)
    if rows == _ROWS_THAT_JUST_FIT and (whole or 8 * tens >= 7 * eights):
        rows = 8
    while rows > 8 and present <= rows // 2:
        rows //= 2
    return rows


def broadcast_constants(subgroup_size: int, rows: int) -> dict[str, Constant]:
    """How broadcast rows are distributed over a subgroup's invocations."""
    span = max(n for n in range(1, min(subgroup_size, rows) + 1) if rows % n == 0)
    return {"THREADS": subgroup_size, "SPAN": span, "BLOCKS": rows // span}


def _changes(profile: Profile) -> tuple[Change, ...]:
    if profile.textures:
        rows = profile.texture_nt_rows, profile.texture_nn_rows
        nt, nn = (32 if each == 16 else 16 for each in rows)
        return (
            {"texture_nt_rows": nt},
            {"texture_nn_rows": nn},
            {"texture_nt_rows": nt, "texture_nn_rows": nn},
        )
    if profile.is_software:
        return ({"gemm_tile": 8}, {"gemm_tile": 16, "gemm_group": (16, 1)})
    tried = _MATRIX_CHANGES if profile.matrix else _CHANGES
    changed = ((change, replace(profile, **change)) for change in tried)
    return tuple(change for change, tiling in changed if tiling != profile and _is_allowed(tiling))


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
    if profile.gemm_kind == "matrix":
        tile = profile.tile_on_matrix_units()
        # A tile that may not be deep is already another candidate.
        fits = all(tile.fits(profile.limits, with_rows=rows) for rows in (True, False))
        return fits and tile.deep == profile.matrix_deep
    if profile.gemm_kind == "tiled":
        across, down = profile.tile_group
        return Limits(across * down, tile_bytes(across, down)).within(profile.limits)
    across, down = profile.gemm_group
    return across * down <= profile.limits.invocations


TUNABLES = (Tunable("products", lambda launch: launch.kernel == "gemm", _changes),)
