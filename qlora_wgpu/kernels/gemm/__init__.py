"""Matrix products: the problem, its variants and tunables."""

from __future__ import annotations

from qlora_wgpu.kernels.common import Kernel, Variant, always
from qlora_wgpu.kernels.dequantize import QuantizedView
from qlora_wgpu.kernels.gemm.few_rows import narrow, narrow_fits, packed_weights, shared, subgroup
from qlora_wgpu.kernels.gemm.launch import Factors, factors_of, further_layers
from qlora_wgpu.kernels.gemm.packed import PackedWeights
from qlora_wgpu.kernels.gemm.problem import PART_UNIT, Gemm, LoraTerm, size_class
from qlora_wgpu.kernels.gemm.tiles import (
    SKINNY,
    TUNABLES,
    broadcast_constants,
    matrix_units,
    matrix_units_fits,
    registers,
    skinny,
    subgroup_texture,
    texture_fits,
    workgroup_tiles,
    workgroup_tiles_fits,
)

__all__ = [
    "GEMM",
    "KERNELS",
    "PART_UNIT",
    "TUNABLES",
    "Factors",
    "Gemm",
    "LoraTerm",
    "PackedWeights",
    "QuantizedView",
    "broadcast_constants",
    "factors_of",
    "further_layers",
    "matrix_units",
    "size_class",
]

FEW_ROWS: tuple[Variant[Gemm], ...] = (
    Variant(lambda gemm, profile: gemm.few and isinstance(gemm.w, PackedWeights), packed_weights),
    Variant(narrow_fits, narrow),
    Variant(lambda gemm, profile: gemm.few and profile.textures, subgroup),
    Variant(lambda gemm, profile: gemm.few, shared),
)
MANY_ROWS: tuple[Variant[Gemm], ...] = (
    Variant(texture_fits, subgroup_texture),
    Variant(
        lambda gemm, profile: gemm.tiling_columns <= SKINNY or gemm.dropout is not None, skinny
    ),
    Variant(matrix_units_fits, matrix_units),
    Variant(workgroup_tiles_fits, workgroup_tiles),
    Variant(always, registers),
)
GEMM: Kernel[Gemm] = Kernel("gemm", (*FEW_ROWS, *MANY_ROWS))
KERNELS = (GEMM,)
