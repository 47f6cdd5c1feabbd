"""Constants and parameters of kernels whose rows belong to experts (``common/experts.wgsl``)."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.tensor import Tensor

EXPERT_TILE = 64  # rows of one expert; a multiple of what any product's workgroup makes
NEW_TOKENS_TILE = 1  # of new tokens, whose products make each row by itself


@dataclass(frozen=True)
class ExpertTiles:
    """Which expert each tile of rows belongs to, and whose weights are at hand.

    Attributes:
        experts: uint32 (tiles).
        rows: uint32 (2 · experts), the first row of each expert and the one past its last.
        first: The first expert at hand.
        count: How many are.
        tile: Rows of a tile.
    """

    experts: Tensor
    rows: Tensor
    first: int
    count: int
    tile: int = EXPERT_TILE


def expert_params(experts: ExpertTiles | None, lora_stride: int) -> dict[str, int]:
    """Parameters of a kernel whose rows may belong to experts.

    Args:
        experts: Whose weights are at hand, if rows belong to any.
        lora_stride: From one expert's A or B to the next one's, in the units that the kernel counts
            in.
    """
    if experts is None:
        return {"expert0": 0, "experts": 1, "lora_expert": 0}
    return {
        "expert0": experts.first,
        "experts": experts.count,
        "lora_expert": lora_stride,
    }


def expert_constants(
    experts: ExpertTiles | None, tensors: dict[str, Tensor | None]
) -> dict[str, Constant]:
    """Constants of such a kernel; binds what it looks up."""
    if experts is None:
        return {}
    tensors["tile_experts"] = experts.experts
    return {"EXPERT_TILE": experts.tile}


def expert_count(expert_rows: Tensor | None) -> int:
    """The number of experts that a reduction over rows is for."""
    return 1 if expert_rows is None else expert_rows.columns // 2
