"""Quantized weights to floats, a matrix or a shard of its rows at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.wgsl import fold_workgroups
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, ceil_div
from qlora_wgpu.kernels.common import Kernel, Variant, always
from qlora_wgpu.weight_format import WeightFormat

MOST_TOGETHER = 3  # matrices of a launch
EXPERT_STRIDES = ("codes_expert", "absmax_expert", "nested_expert", "maps_expert")
_BEYOND = 0xFFFFFFFF  # where there is no further matrix
_TURNS = 8  # units of an invocation of dequantize/forward_shared.wgsl
_CODES = 32  # that an invocation of the kernel for software adapters decodes


@dataclass(frozen=True)
class Dequantization:
    """w = quant_map[codes] · scales (+ minima), rows ``row0`` and on of one or several matrices."""

    w: Tensor  # (rows, in_features), of any type
    row0: int  # the first row of ``w`` within the matrix
    codes: Tensor  # eight to a uint32, or four of 8 bits
    # float32 scales of the blocks, or their 8-bit codes if doubly quantized; each followed by the
    # block's minimum, if there are any.
    absmax: Tensor
    maps: Tensor  # the values of the codes, then the 256 of the scales' codes and their offset
    nested_absmax: Tensor | None  # scales of the scales, if doubly quantized
    # The values of each pair of codes, (256, 4) float32 in a texture, if there is one.
    codebook: Tensor | None
    form: WeightFormat  # what codes stand for, and which elements share a scale
    experts: int  # how many matrices lie one below the other
    expert_rows: int  # rows of each of them
    # Elements of ``codes``, ``absmax``, ``nested_absmax`` and ``maps`` from one matrix to the next.
    strides: tuple[int, int, int, int]
    # If given, ``w`` has the rows of several matrices, and the whole matrix is written to its rows
    # from this one on.
    among: int | None = None

    def _stored(self) -> dict[str, Tensor | None]:
        double = self.nested_absmax is not None
        return {
            "codes": self.codes,
            "absmax": self.absmax,
            "nested_absmax": self.nested_absmax,
            "maps": self.maps if double else None,
            "w": self.w,
        }

    def _apart(self) -> dict[str, int]:
        return dict(zip(EXPERT_STRIDES, self.strides, strict=True))

    def _constants(self) -> dict[str, bool | int | float]:
        return {
            "EXPERTS": self.experts > 1,
            "GROUP": False,
            "FOURS": False,
            **format_constants(self.form),
        }


@dataclass(frozen=True)
class GroupDequantization:
    """Up to three matrices one below the other, whose parts lie in one range of one buffer."""

    w: Tensor  # (rows of all, in_features), of any type
    group: Tensor  # the range, in words: all parts of all matrices
    # Where each matrix's codes, absmax, nested_absmax and maps begin, in words.
    begins: Mapping[str, Sequence[int]]
    rows: Sequence[int]  # of each matrix
    form: WeightFormat  # of all of them, which share the codes' values

    def launch(self, g: Graph) -> None:
        """Adds the launch."""
        if shares_scales(self.form, self.w.columns, g.profile):
            self._launch_shared(g)
        else:
            self._launch_units(g)

    def _launch_units(self, g: Graph) -> None:
        units, w = self.w.units(8), self.w
        g.launch(
            "dequantize/forward.wgsl",
            w.rows * units,
            self._bound(g),
            {
                "stride": units,
                "unit1": self._first_units()[1],
                "unit2": self._first_units()[2] if len(self.rows) > 2 else _BEYOND,
                **self._begins(),
            },
            {**self._constants(), "ALIGNED": whole_blocks(self.form, w.columns, 8)},
        )

    def _launch_shared(self, g: Graph) -> None:
        firsts, tile = self._first_units(), _tile(g.profile)
        tiles = [ceil_div(rows * self.w.units(8), tile) for rows in self.rows]
        tile1, tile2 = (sum(tiles[:n]) if len(tiles) > n else _BEYOND for n in (1, 2))
        g.launch(
            "dequantize/forward_shared.wgsl",
            fold_workgroups(sum(tiles)),
            self._bound(g),
            {
                "units": firsts[3],
                "unit1": firsts[1],
                "unit2": firsts[2],
                "tile1": tile1,
                "tile2": tile2,
                **self._begins(),
            },
            {**self._constants(), **shared_constants(self.form, 0, g.profile)},
            label="dequantize/forward",
        )

    def _bound(self, g: Graph) -> dict[str, Tensor | None]:
        saturated = g.saturated if self.w.dtype == "float16" else None
        return {"group": self.group, "w": self.w, "saturated": saturated}

    def _first_units(self) -> list[int]:
        """Where each matrix begins in ``w``, in units; what is not there begins at its end."""
        return [sum(self.rows[:n]) * self.w.units(8) for n in range(MOST_TOGETHER + 1)]

    def _begins(self) -> dict[str, int]:
        begins = {
            f"{part}{n}": (*begins, 0)[min(n, len(begins))]
            for part, begins in self.begins.items()
            for n in range(MOST_TOGETHER)
        }
        return {**begins, **dict.fromkeys(EXPERT_STRIDES, 0)}

    def _constants(self) -> dict[str, bool | int | float]:
        return {"GROUP": True, "FOURS": False, "EXPERTS": False, **format_constants(self.form)}


def format_constants(form: WeightFormat) -> dict[str, bool | int | float]:
    """What the kernels are told of a format."""
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
    """Where 32 codes share a row and a block."""
    whole = fits_words(problem.form, problem.w.columns)
    alone = problem.among is None
    return profile.textures and whole and alone and problem.codebook is not None


def _by_codebook(g: Graph, problem: Dequantization) -> None:
    """For software adapters: 32 codes of 4 bits at a time, looked up by pairs in a texture."""
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
    """For GPUs: tiles of units, whose scales and codes' values are in workgroup memory."""
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
            "quant_map": problem.maps,
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
            "quant_map": problem.maps,
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
    """Whether the kernel that takes scales and values into workgroup memory dequantizes a format.

    It does on GPUs whose kernels use such memory, where eight neighbours share a row and a block,
    blocks follow each other, and no code stands for NaN or infinity.
    """
    in_order = form.block_rows is None and whole_blocks(form, columns, 8)
    is_finite = bool(np.isfinite(form.quant_map).all())
    return profile.gemm_kind != "register" and in_order and is_finite


def shared_constants(
    form: WeightFormat, first: int, profile: Profile
) -> dict[str, bool | int | float]:
    """What that kernel is told of blocks where the first unit of eight is ``first``."""
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
    """Units of a workgroup of that kernel."""
    return profile.flat_group * _TURNS


def fits_words(form: WeightFormat, columns: int) -> bool:
    """Whether kernels may take 32 codes of 4 bits at a time, whose blocks follow each other."""
    return form.bits == 4 and form.block_rows is None and whole_blocks(form, columns, _CODES)


def whole_blocks(form: WeightFormat, columns: int, count: int) -> bool:
    """Whether ``count`` neighbours, from a multiple of it on, share a row and a block."""
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
