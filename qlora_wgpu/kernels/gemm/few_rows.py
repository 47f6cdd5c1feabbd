"""Products of few rows with a frozen matrix, which is read once, as in decoding.

Quantized matrices of any format (``weight_format.py``) are decoded within the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, ceil_div, round_up
from qlora_wgpu.kernels.dequantize import (
    QuantizedView,
    format_begins,
    format_constants,
    whole_blocks,
)
from qlora_wgpu.kernels.gemm.launch import bound
from qlora_wgpu.kernels.gemm.packed import CODES, PackedWeights, is_affine
from qlora_wgpu.kernels.gemm.problem import Gemm

_MOST_ROWS = 8  # maximum rows per invocation; more rows read all weights again
_MOST_PACKED_ROWS = 32  # the same of packed weights
_MOST_ROWS_OF_CODES = 16  # of those packed as codes: twice as many take three times to compile
_THREADS = 128  # per workgroup on GPUs
_MANY_READS = 350  # of x: 43 ns each from a buffer, 17 ns from a texture, and 9,000 ns for a copy
_MOST_RANKS = 32  # columns of a narrow product per workgroup whose invocations have a row each
_FEW_COLUMNS = 64  # with so few, more threads share a row, since there are few workgroups


def launch_few(
    g: Graph,
    gemm: Gemm,
    path: str,
    columns: int,
    constants: dict[str, Constant],
    together: int | None = None,
) -> None:
    w = gemm.w
    of_all = bound(gemm, _weights(w))
    together = together or _rows_together(gemm)
    g.launch(
        path,
        (ceil_div(gemm.columns, columns), ceil_div(gemm.x.rows, together), 1),
        of_all.tensors,
        {
            **of_all.params,
            "scale_stride": 0,
            **(_packed_strides(w, g.profile) if isinstance(w, PackedWeights) else {}),
            **format_begins(w if isinstance(w, QuantizedView) else None),
        },
        {
            **of_all.constants,
            "ROWS": together,
            "EIGHT": False,
            "KEEPS": False,
            "X_IN_TEXTURE": _needs_texture(gemm, g.profile),
            **_codes(gemm, g.profile),
            **constants,
        },
        flops=gemm.flops,
        label=gemm.label or "few_rows/forward",
    )


def _rows_together(gemm: Gemm) -> int:
    """Rows per invocation, all of one expert."""
    return 1 if gemm.experts is not None else min(gemm.x.rows, _MOST_ROWS)


def _needs_texture(gemm: Gemm, profile: Profile) -> bool:
    """Whether x is read so often on software GPUs that it must be in a texture."""
    if not isinstance(gemm.w, PackedWeights):
        return False
    workgroups = ceil_div(gemm.columns, 4 * profile.subgroup_size)
    return gemm.x.rows * workgroups * ceil_div(gemm.x.units(8), 8) >= _MANY_READS


def _weights(w: Tensor | QuantizedView | PackedWeights) -> dict[str, Tensor | None]:
    if isinstance(w, PackedWeights):
        of_codes = {} if w.form is None else {"scales": w.scales, "minima": w.minima}
        return {"w": w.words, **of_codes}
    return {"w": w} if isinstance(w, Tensor) else {"group": w.words}


def _packed_strides(w: PackedWeights, profile: Profile) -> dict[str, int]:
    lanes = profile.subgroup_size
    units = w.words.units(8) if w.form is None else w.columns // CODES
    return {"w_stride": 4 * units * lanes, "scale_stride": w.blocks * lanes}


def _codes(gemm: Gemm, profile: Profile) -> dict[str, Constant]:
    w = gemm.w
    if isinstance(w, PackedWeights):
        return w.constants()
    if isinstance(w, Tensor):
        return {"DENSE": True, "STRIPS": False}
    form, columns = w.form, w.columns
    unit_words = form.bits // 4
    whole = columns % (32 // unit_words) == 0
    affine = is_affine(form)
    return {
        "DENSE": False,
        "STRIPS": False,
        "GROUP": True,
        "FOURS": not profile.is_software,
        "EXPERTS": gemm.experts is not None,
        "UNIT_WORDS": unit_words,
        "WHOLE": whole,
        "CHUNK": 4 // unit_words if whole else 1,
        "SCALED": next(n for n in (8, 4, 2, 1) if whole_blocks(form, columns, 8 * n)),
        "AFFINE": affine,
        "SELECTS": form.bits == 4 and not affine and profile.is_software,
        **format_constants(form),
    }


def _taken_together(gemm: Gemm, profile: Profile) -> dict[str, Constant]:
    """Whether an invocation loads all units of a chunk at once or one after the other."""
    least = profile.unit_by_unit
    by_unit = 0 < least <= _rows_together(gemm)
    chunk = _codes(gemm, profile).get("CHUNK", 1)
    return {"UNIT_BY_UNIT": by_unit, "TOGETHER": 1 if by_unit else chunk}


def packed_weights(g: Graph, gemm: Gemm) -> None:
    """For software GPUs: as many rows of x as a subgroup has invocations are loaded at once."""
    assert isinstance(gemm.w, PackedWeights)
    threads, units = g.profile.subgroup_size, gemm.x.units(8)
    rows = min(gemm.x.rows, threads)
    most = _MOST_PACKED_ROWS if gemm.w.form is None else _MOST_ROWS_OF_CODES
    blocks = ceil_div(gemm.x.rows, rows)
    blocks = ceil_div(blocks, ceil_div(blocks, max(most // rows, 1)))
    span = next(n for n in (8, 4, 2, 1) if units % n == 0 and n <= threads)
    own: dict[str, Constant] = {
        "THREADS": threads,
        "ONE_ROW": gemm.x.rows == 1,
        "SPAN": span,
        "ROWS": rows,
        "BLOCKS": blocks,
        "LAYERS": 1 + len(gemm.others),
    }
    launch_few(g, gemm, "few_rows/strips.wgsl", 4 * threads, own, together=rows * blocks)


def narrow_fits(gemm: Gemm, profile: Profile) -> bool:
    """Whether w is float32 in a buffer, such as LoRA's A, without experts and without a term."""
    w = gemm.w
    is_buffer = isinstance(w, Tensor) and w.dtype == "float32" and not w.texture
    plain = is_buffer and gemm.few and gemm.experts is None and gemm.lora is None
    return profile.textures and plain and gemm.columns <= _FEW_COLUMNS


def narrow(g: Graph, gemm: Gemm) -> None:
    """For software GPUs: for so few columns that invocations share them, or have a row each."""
    plain = gemm.residual is None and gemm.bias is None and not gemm.others
    # One workgroup of rows each would leave the other processors idle.
    if plain and gemm.x.rows > g.profile.subgroup_size:
        narrow_rows(g, gemm.x, gemm.dense, gemm.y, gemm.scale, label=gemm.label)
        return
    together = rows_of_workgroup(gemm.x.rows)
    constants: dict[str, Constant] = {"THREADS": g.profile.subgroup_size}
    launch_few(g, gemm, "few_rows/narrow.wgsl", 8, constants, together=together)


def narrow_rows(
    g: Graph,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    scale: float,
    norm: Mapping[str, Tensor] = MappingProxyType({}),
    eps: float = 0.0,
    *,
    label: str,
) -> None:
    """With a row per invocation; ``norm`` has the weight of the norm of x, and its result."""
    threads, groups = g.profile.subgroup_size, ceil_div(w.rows, _MOST_RANKS)
    ranks = round_up(ceil_div(w.rows, groups), 4)
    g.launch(
        "few_rows/narrow_rows.wgsl",
        (groups, ceil_div(x.rows, threads), 1),
        {"x": x, "w": w, "y": y, **norm},
        {"ranks": w.rows, "eps": eps, "scale": scale},
        {
            "THREADS": threads,
            "RANKS": ranks,
            "FOURS": ranks // 4,
            "LOADS": ceil_div(2 * ranks, threads),
        },
        flops=2 * x.rows * w.rows * x.columns,
        label=label,
    )


def rows_of_workgroup(rows: int) -> int:
    """For how many rows a workgroup of a subgroup reads weights once, so that two have work."""
    return min(max(rows // 2, 1), _MOST_ROWS)


def subgroup(g: Graph, gemm: Gemm) -> None:
    """For software GPUs: four columns per invocation, rows of x are broadcast."""
    threads, units = g.profile.subgroup_size, gemm.x.units(8)
    span = next(n for n in (8, 4, 2, 1) if units % n == 0 and n <= threads)
    launch_few(g, gemm, "few_rows/subgroup.wgsl", 4 * threads, {"THREADS": threads, "SPAN": span})


def shared(g: Graph, gemm: Gemm) -> None:
    """For GPUs: neighbouring invocations read neighbouring bytes of a row and share its sum."""
    threads, groups = 1, g.profile.flat_group
    if not g.profile.is_software:
        chunks = gemm.x.columns // (32 if gemm.is_quantized else 8)
        most = _THREADS if gemm.columns <= _FEW_COLUMNS else 32
        threads = max(min(1 << max(chunks.bit_length() - 1, 0), most), 8)
        groups = _THREADS // threads
    constants: dict[str, Constant] = {
        "THREADS": threads,
        "GROUPS": groups,
        "ONE_THREAD": threads == 1,
        **_taken_together(gemm, g.profile),
    }
    launch_few(g, gemm, "few_rows/shared.wgsl", 4 * groups, constants)
