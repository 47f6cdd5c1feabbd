"""Dequantization, a matrix or a shard of its rows at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.wgsl import fold_workgroups
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, ceil_div
from qlora_wgpu.kernels.common import Kernel, Variant, always
from qlora_wgpu.weight_format import WeightFormat

MOST_TOGETHER = 3  # maximum matrices per launch
EXPERT_STRIDES = ("codes_expert", "absmax_expert", "nested_expert", "maps_expert")
_BEYOND = 0xFFFFFFFF  # if there is no further matrix
_TURNS = 8  # units per invocation of dequantize/forward_shared.wgsl
_CODES = 32  # per invocation of the kernel for software GPUs


@dataclass(frozen=True)
class Dequantization:
    """w = quant_map[codes] · scales (+ minima), from row ``row0`` of one or several matrices."""

    w: Tensor  # (rows, in_features), of any type
    row0: int  # the first row of ``w`` within the matrix
    # By the kernels' names: codes, eight per uint32, or four if of 8 bits; absmax, float32 scales
    # of the blocks, or their 8-bit codes if double-quantized, each followed by the block's minimum,
    # if there are any; nested_absmax, scales of the scales, if double-quantized; maps, the values
    # of the codes, then the 256 of the scales' codes and their offset.
    parts: Mapping[str, Tensor]
    # The values of each pair of codes, (256, 4) float32 in a texture, if there is one.
    codebook: Tensor | None
    form: WeightFormat  # the values of codes, and which elements share a scale
    experts: int  # number of stacked matrices
    expert_rows: int  # rows of each of them
    # Strides of these parts between matrices, in elements, as in ``EXPERT_STRIDES``.
    strides: tuple[int, int, int, int]
    # If given, ``w`` has the rows of several matrices, and the whole matrix is written from this
    # row on.
    among: int | None = None

    def _stored(self) -> dict[str, Tensor]:
        unread = "" if "nested_absmax" in self.parts else "maps"
        return {"w": self.w, **{name: t for name, t in self.parts.items() if name != unread}}

    def _apart(self) -> dict[str, int]:
        return dict(zip(EXPERT_STRIDES, self.strides, strict=True))

    def _constants(self) -> dict[str, bool | int | float]:
        return {
            "EXPERTS": self.experts > 1,
            "GROUP": False,
            "FOURS": False,
            **format_constants(self.form),
        }


_PARTS = ("codes", "absmax", "nested", "maps")


@dataclass(frozen=True)
class QuantizedView:
    """Stacked quantized matrices of one format, with all parts in one range of words."""

    words: Tensor  # the range, uint32
    begins: Mapping[str, Sequence[int]]  # each matrix's codes, absmax, nested, maps, in words
    rows: Sequence[int]  # of each matrix
    columns: int
    form: WeightFormat  # common to all, including the values of codes
    # Strides between experts of codes, absmax, nested_absmax and maps, in words.
    strides: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self.rows), self.columns


def format_begins(w: QuantizedView | None) -> dict[str, int]:
    """Parameters: the offsets of a quantized matrix's parts; zeros for any other matrix."""
    places = {name: (0,) if w is None else tuple(w.begins.get(name, (0,))) for name in _PARTS}
    return {
        f"{name}{i}": (*begins, 0, 0)[i]
        for name, begins in places.items()
        for i in range(MOST_TOGETHER)
    } | dict(zip(EXPERT_STRIDES, (0, 0, 0, 0) if w is None else w.strides, strict=True))


@dataclass(frozen=True)
class GroupDequantization:
    """Up to three stacked matrices into w (rows of all, in_features), of any type."""

    w: Tensor
    group: QuantizedView

    def launch(self, g: Graph) -> None:
        w, form = self.w, self.group.form
        firsts = [sum(self.group.rows[:n]) * w.units(8) for n in range(MOST_TOGETHER + 1)]
        tensors = {
            "group": self.group.words,
            "w": w,
            "saturated": g.saturated if w.dtype == "float16" else None,
        }
        begins = format_begins(replace(self.group, strides=(0, 0, 0, 0)))
        constants = {"GROUP": True, "FOURS": False, "EXPERTS": False, **format_constants(form)}
        if not shares_scales(form, w.columns, g.profile):
            unit2 = firsts[2] if len(self.group.rows) > 2 else _BEYOND
            params = {"stride": w.units(8), "unit1": firsts[1], "unit2": unit2, **begins}
            constants["ALIGNED"] = whole_blocks(form, w.columns, 8)
            g.launch("dequantize/forward.wgsl", w.rows * w.units(8), tensors, params, constants)
            return
        tile = _tile(g.profile)
        tiles = [ceil_div(rows * w.units(8), tile) for rows in self.group.rows]
        tile1, tile2 = (sum(tiles[:n]) if len(tiles) > n else _BEYOND for n in (1, 2))
        params = {"units": firsts[3], "unit1": firsts[1], "unit2": firsts[2]}
        g.launch(
            "dequantize/forward_shared.wgsl",
            fold_workgroups(sum(tiles)),
            tensors,
            {**params, "tile1": tile1, "tile2": tile2, **begins},
            {**constants, **shared_constants(form, 0, g.profile)},
            label="dequantize/forward",
        )


def format_constants(form: WeightFormat) -> dict[str, bool | int | float]:
    return {
        "NESTED": form.nested_blocksize is not None,
        "BLOCKSIZE": form.blocksize,
        "NESTED_BLOCKSIZE": form.nested_blocksize or 1,
        "VALUES": form.quant_map.size,
        "EIGHT_BITS": form.bits == 8,
        "MINIMA": form.has_minima,
        "ZEROS": form.has_zeros,
        "OFFSET": form.has_offset,
        "TILES": form.block_rows is not None,
        "TILE_ROWS": form.block_rows or 1,
        "TWO_FACTORS": form.factor != 1.0,
    }


def _by_codebook_fits(problem: Dequantization, profile: Profile) -> bool:
    """Whether 32 codes share a row and a block."""
    whole = fits_words(problem.form, problem.w.columns)
    alone = problem.among is None
    return profile.textures and whole and alone and problem.codebook is not None


def _by_codebook(g: Graph, problem: Dequantization) -> None:
    """For software GPUs: 32 codes of 4 bits at a time, looked up by pairs in a texture."""
    count = problem.w.rows * problem.w.columns // _CODES
    g.launch(
        "dequantize/forward_texture.wgsl",
        count,
        {**problem._stored(), "codebook": problem.codebook},
        {
            "count": count,
            "first": problem.row0 * problem.w.columns // _CODES,
            "expert_units": problem.expert_rows * problem.w.columns // _CODES,
            **problem._apart(),
        },
        problem._constants(),
        label="dequantize/forward",
    )


def _by_tiles(g: Graph, problem: Dequantization) -> None:
    """For GPUs: tiles of units, with scales and values of codes in workgroup memory."""
    w, together = problem.w, problem.experts > 1
    first = problem.row0 * w.units(8)
    rows = w.rows if problem.among is None and not together else problem.expert_rows
    units = rows * w.units(8)
    along, across, _ = fold_workgroups(ceil_div(units, _tile(g.profile)))
    g.launch(
        "dequantize/forward_shared.wgsl",
        (along, across, w.rows // rows if together else 1),
        {
            **problem._stored(),
            "quant_map": problem.parts["maps"],
            "saturated": g.saturated if w.dtype == "float16" else None,
        },
        {
            "units": units,
            "first": first,
            "w_unit0": (problem.among or 0) * w.units(8),
            **problem._apart(),
        },
        {**problem._constants(), **shared_constants(problem.form, first, g.profile)},
        label="dequantize/forward",
    )


def _by_units(g: Graph, problem: Dequantization) -> None:
    """Eight codes at a time, of any shape and format."""
    w = problem.w
    rows = w.rows if problem.among is None else problem.expert_rows
    g.launch(
        "dequantize/forward.wgsl",
        rows * w.units(8),
        {
            **problem._stored(),
            "quant_map": problem.parts["maps"],
            "saturated": g.saturated if w.dtype == "float16" else None,
        },
        {
            "rows": rows,
            "in_features": w.columns,
            "row0": problem.row0,
            "expert_rows": problem.expert_rows,
            "w_unit0": (problem.among or 0) * w.units(8),
            **problem._apart(),
        },
        {**problem._constants(), "ALIGNED": whole_blocks(problem.form, w.columns, 8)},
    )


def shares_scales(form: WeightFormat, columns: int, profile: Profile) -> bool:
    """Whether the kernel with scales and values in workgroup memory supports a format.

    It does on GPUs whose kernels use workgroup memory, if eight neighbours share a row and a block,
    blocks follow each other, and no code is NaN or infinity.
    """
    in_order = form.block_rows is None and whole_blocks(form, columns, 8)
    is_finite = bool(np.isfinite(form.quant_map).all())
    return profile.gemm_kind != "register" and in_order and is_finite


def shared_constants(
    form: WeightFormat, first: int, profile: Profile
) -> dict[str, bool | int | float]:
    """That kernel's constants of blocks, if the first unit of eight is ``first``."""
    units, tile = form.blocksize // 8, _tile(profile)
    even = first % units == 0 and (tile % units == 0 or units % tile == 0)
    most = float(np.abs(form.quant_map).max()) * max(abs(form.factor), 1.0)
    return {
        "ALIGNED": True,
        "THREADS": profile.flat_group,
        "UNITS": units,
        "SCALES": max(tile // units, 1) if even else (tile - 1) // units + 2,
        "EVEN": even,
        "MOST": math.ceil(most),
    }


def _tile(profile: Profile) -> int:
    return profile.flat_group * _TURNS


def fits_words(form: WeightFormat, columns: int) -> bool:
    """Whether kernels can process 32 codes of 4 bits at a time, in consecutive blocks."""
    return form.bits == 4 and form.block_rows is None and whole_blocks(form, columns, _CODES)


def whole_blocks(form: WeightFormat, columns: int, count: int) -> bool:
    """Whether ``count`` aligned neighbours share a row and a block."""
    return columns % count == 0 and form.blocksize % count == 0


DEQUANTIZE: Kernel[Dequantization] = Kernel(
    "dequantize",
    (
        Variant(_by_codebook_fits, _by_codebook),
        Variant(
            lambda problem, profile: shares_scales(problem.form, problem.w.columns, profile),
            _by_tiles,
        ),
        Variant(always, _by_units),
    ),
)
KERNELS = (DEQUANTIZE,)
