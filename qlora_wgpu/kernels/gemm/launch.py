"""The dispatches of a product: one, or a split reduction and its sum; copies in f16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor, ceil_div, matrix, round_up
from qlora_wgpu.kernels.common import dropout_params, expert_constants, expert_params, sum_parts
from qlora_wgpu.kernels.gemm.problem import Gemm

LEAST_PART = 512  # minimum terms of a part of a split reduction, so that summing stays cheap
_COUNTED_THREADS = 64  # invocations per workgroup as counted by ``Profile.least_workgroups``


@dataclass(frozen=True)
class Tiling:
    """A shader and its tiling."""

    path: str
    rows: int  # of results per workgroup
    columns: int
    constants: dict[str, Constant]  # the shader's, besides the common ones
    rows_first: bool = False  # whether workgroups are counted along the rows first
    threads: int = _COUNTED_THREADS  # invocations per workgroup
    any_parts: bool = False  # whether the reduction can be split with any fused addition
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # additional bindings
    direct: bool = False  # whether whole tiles can be stored directly to a float32 y
    loads: bool = False  # whether their sums can start with the values that they are added to
    eights: bool = (
        False  # whether it can write eight results at a time, for textures, if none is added
    )


@dataclass(frozen=True)
class Bound:
    """Bindings, parameters and constants of all shaders of products."""

    tensors: dict[str, Tensor | None]
    params: dict[str, int | float]
    constants: dict[str, Constant]


def bound(
    gemm: Gemm, weights: Mapping[str, Tensor | None], parts_in: Tensor | None = None
) -> Bound:
    """Those of a product; with ``parts_in``, of partial sums without fused additions."""
    lora, y, whole, w = gemm.lora, parts_in or gemm.y, parts_in is None, gemm.w
    tensors: dict[str, Tensor | None] = {
        **weights,
        "x": gemm.x,
        "y": y,
        "u": lora.u if lora is not None else None,
        "b" if gemm.with_rows else "a": lora.factor if lora is not None else None,
        "bias": gemm.bias if whole else None,
        "residual": gemm.residual if whole else None,
    }
    others, layers = (
        further_layers("y", gemm.y, gemm.others, 4)
        if gemm.with_rows
        else further_layers("x", gemm.x, gemm.others, 8, 8)
    )
    tensors |= others
    bias1, bias2 = (*(begin // 4 for begin in gemm.bias_begins), 0, 0)[:2]
    w_stride = w.units(8) if isinstance(w, Tensor) else 0
    params: dict[str, int | float] = {
        "columns": gemm.columns,
        "w_expert": gemm.expert_stride // 8 or gemm.own_rows * w_stride,
        "y_stride": y.units(4),
        "y_unit0": gemm.row0 // 4 if gemm.with_rows and whole else 0,
        "scale": gemm.scale,
        "r": lora.rank(with_rows=gemm.with_rows) if lora is not None else 0,
        "b_stride": lora.factor.stride if lora is not None else 0,
        **expert_params(gemm.experts, lora.stride // 4 if lora is not None else 0),
        **layers,
        "bias1": bias1,
        "bias2": bias2,
        "bias_expert": 0 if gemm.experts is None or gemm.bias is None else gemm.bias.units(4),
    }
    adds = gemm.accumulate and whole
    return Bound(tensors, params, {"ACCUMULATE": adds, **expert_constants(gemm.experts, tensors)})


def launch_whole(
    g: Graph,
    gemm: Gemm,
    tiling: Tiling,
    parts_in: Tensor | None = None,
    parts: int = 1,
    part: int = 0,
) -> None:
    """One dispatch; with ``parts_in``, the parts' results are stacked there."""
    of_all = bound(gemm, {"w": gemm.dense}, parts_in)
    across = ceil_div(gemm.columns, tiling.columns)
    down = ceil_div(gemm.x.rows, tiling.rows)
    g.launch(
        tiling.path,
        (down, across, parts) if tiling.rows_first else (across, down, parts),
        {
            **tiling.tensors,
            **of_all.tensors,
            "batch_info": gemm.batch_info if gemm.asks_batch else None,
        },
        {
            **of_all.params,
            "k": gemm.depth,
            "k_part": part or round_up(gemm.depth, 64),
            "x_unit0": 0 if gemm.with_rows else gemm.row0 // 8,
            "row0": gemm.row0 if gemm.with_rows else 0,
            "first_row": gemm.first_row or 0,
            **dropout_params(gemm.mask),
        },
        {
            **of_all.constants,
            "ROW_COUNT": gemm.first_row is not None,
            "DROPOUT": gemm.mask is not None,
            **_way_out(gemm, tiling, in_parts=parts_in is not None),
            **tiling.constants,
        },
        flops=gemm.flops,
        label=gemm.label,
    )


def _way_out(gemm: Gemm, tiling: Tiling, *, in_parts: bool) -> dict[str, Constant]:
    """Constants for storing whole tiles, and for the initial values of their sums."""
    residual, bias = (None, None) if in_parts else (gemm.residual, gemm.bias)
    float32 = in_parts or gemm.y.dtype == "float32"
    alone = not (gemm.with_rows and gemm.others)
    plain = residual is None and bias is None and not gemm.accumulate
    begin = gemm.row0 if gemm.with_rows else 0
    adds = residual is None or (tiling.loads and residual.dtype == "float32")
    return {
        "DIRECT": tiling.direct and float32 and alone and bias is None and adds,
        "EIGHT": tiling.eights and plain and not float32 and begin % 8 == 0,
        "LOADS": tiling.loads,
        "RESIDUAL": residual is not None,
    }


def further_layers(
    name: str, first: Tensor, others: tuple[Tensor, ...], unit: int, begin_unit: int = 1
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Bindings and parameters of the second and third layer of one input."""
    begin, tensors = first.columns, {}
    params = {"begin1": 0, "begin2": 0, "stride1": 0, "stride2": 0}
    for index, other in enumerate(others, 1):
        tensors[f"{name}{index}"] = other
        params |= {f"begin{index}": begin // begin_unit, f"stride{index}": other.units(unit)}
        begin += other.columns
    # Missing layers start past the end.
    params |= {f"begin{i}": 0xFFFFFFFF for i in range(len(others) + 1, 3)}
    return tensors, params


def launch_split(g: Graph, gemm: Gemm, tiling: Tiling) -> None:
    """Splits a reduction into its given parts, or a long one with too few results for a GPU."""
    workgroups = ceil_div(gemm.x.rows, tiling.rows) * ceil_div(gemm.tiling_columns, tiling.columns)
    least = g.profile.least_workgroups * _COUNTED_THREADS // tiling.threads
    parts = min(least // workgroups, gemm.depth // LEAST_PART)
    part = gemm.part or round_up(ceil_div(gemm.depth, max(parts, 1)), 64)
    parts = ceil_div(gemm.depth, part)
    plain = gemm.lora is None and not gemm.with_rows
    whole = gemm.experts is not None or (gemm.with_rows and gemm.others)
    alone = parts == 1 and not (gemm.part and gemm.accumulate)
    if alone or whole or not (plain or tiling.any_parts):
        launch_whole(g, gemm, tiling)
        return
    stacked = g.float32(f"parts of {gemm.y.name}", parts * gemm.y.rows, gemm.columns)
    launch_whole(g, gemm, tiling, stacked, parts, part)
    sum_parts(
        g, stacked, gemm.y, parts, accumulate=gemm.accumulate, bias=gemm.bias,
        residual=gemm.residual, column0=gemm.row0 if gemm.with_rows else 0,
    )  # fmt: skip


SIZED_ROWS = 8  # per workgroup, which loads all at once
_GROUP = 256  # invocations per workgroup, each with one unit of eight


@dataclass(frozen=True)
class Factors:
    """A product's x for matrix units."""

    x: Tensor  # (rows, depth) float16
    # The scale, if any: for each part of the reduction and tile of rows the exponent of a power of
    # two, in float32's encoding.
    exponents: Tensor | None


def factors_of(g: Graph, gemm: Gemm, tile_rows: int) -> Factors:
    """x as f16; scaled if it is a gradient, that is in a product with columns.

    ``tile_rows`` rows, a multiple of ``SIZED_ROWS``, share a power of two.
    """
    if tile_rows % SIZED_ROWS:
        raise GraphError(f"gemm: tiles of {tile_rows} rows are not a multiple of {SIZED_ROWS}")
    x, depth = gemm.x, gemm.depth
    made = matrix(f"{x.name} in f16", x.rows, depth, "float16")
    units = made.units(8)
    part = gemm.part // 8 or units
    blocks, chunks = ceil_div(x.rows, SIZED_ROWS), ceil_div(part, _GROUP)
    others, layers = ({}, {}) if gemm.with_rows else further_layers("x", x, gemm.others, 8, 8)
    count = gemm.batch_info if gemm.first_row is not None else None
    tensors: dict[str, Tensor | None] = {"x": x, **others, "batch_info": count}
    params = {
        "units": units,
        "part": part,
        "blocks": blocks,
        "chunks": chunks,
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
