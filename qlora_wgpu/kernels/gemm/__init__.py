"""Matrix products: their problem, the variants that solve it, and what a tuner may try."""

from __future__ import annotations

from qlora_wgpu.kernels.common import Kernel
from qlora_wgpu.kernels.gemm.few_rows import InStrips, Narrow, Shared, Subgroup
from qlora_wgpu.kernels.gemm.launch import Factors, factors_of, further_layers
from qlora_wgpu.kernels.gemm.packed import PackedWeights, QuantizedView
from qlora_wgpu.kernels.gemm.problem import PART_UNIT, Gemm, LoraTerm, size_class
from qlora_wgpu.kernels.gemm.tiles import (
    TUNABLES,
    MatrixUnits,
    Registers,
    Skinny,
    SubgroupTexture,
    WorkgroupTiles,
    broadcast_constants,
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
    "PackedWeights",
    "QuantizedView",
    "broadcast_constants",
    "factors_of",
    "further_layers",
    "size_class",
]

FEW_ROWS = (InStrips(), Narrow(), Subgroup(), Shared())
MANY_ROWS = (SubgroupTexture(), Skinny(), MatrixUnits(), WorkgroupTiles(), Registers())
GEMM: Kernel[Gemm] = Kernel("gemm", (*FEW_ROWS, *MANY_ROWS))
KERNELS = (GEMM,)
