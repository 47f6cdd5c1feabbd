"""Rotary embedding's kernels."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.launch import GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.common import Kernel, Variant, always


@dataclass(frozen=True)
class Rope:
    """Rotates every head of x by its token's position into y; the same for x1, if given."""

    x: Tensor  # (rows, heads · head_dim)
    y: Tensor  # like x
    table: Tensor  # float32 (positions, rotary_dim / 2) of (cos, sin)
    positions: Tensor  # uint32 (rows)
    head_dim: int  # elements of a head; even
    rotary_dim: int  # rotated elements of a head; even
    interleaved: bool  # whether pairs are neighbours instead of rotary_dim / 2 apart
    sign: float  # 1 rotates, -1 rotates back
    x1: Tensor | None = None  # a second tensor with other heads, in the same launch
    y1: Tensor | None = None  # like x1

    def __post_init__(self) -> None:
        for x, y in ((self.x, self.y), (self.x1, self.y1)):
            if x is not None and (
                y is None
                or x.shape != y.shape
                or x.rows != self.x.rows
                or x.columns % self.head_dim
                or self.head_dim % 2
                or self.rotary_dim > self.head_dim
                or self.rotary_dim % 2
            ):
                raise GraphError(
                    f"rope: {x} has no heads of {self.head_dim} elements, "
                    f"{self.rotary_dim} of them rotated in pairs"
                )

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        return {
            "positions": self.positions,
            "table": self.table,
            "x": self.x,
            "y": self.y,
            "x1": self.x1,
            "y1": self.y1,
        }

    @property
    def strides(self) -> tuple[int, int]:
        return self.x.stride, self.x1.stride if self.x1 is not None else 0


_FEW_ROWS = 16  # for which reading the table is cheaper than copying it


def _units_fits(problem: Rope, profile: Profile) -> bool:
    """Whether heads and their rotated halves are whole units of eight."""
    whole = problem.head_dim % 8 == 0 and problem.rotary_dim % 16 == 0
    return whole and not problem.interleaved


def _units(g: Graph, problem: Rope) -> None:
    """Units of eight elements; on software GPUs with the table in a texture, except in decoding."""
    head, half = problem.head_dim // 8, problem.rotary_dim // 16
    rows, (stride, stride1) = problem.x.rows, problem.strides
    heads, heads1 = stride // problem.head_dim, stride1 // problem.head_dim
    g.launch(
        "rope/rotate_units.wgsl",
        rows * (heads + heads1) * (head - half),
        problem.tensors,
        {"rows": rows, "sign": problem.sign},
        {
            "HEADS": heads,
            "HEADS1": heads1,
            "HEAD": head,
            "HALF": half,
            "TABLE_TEXTURE": g.profile.textures and rows > _FEW_ROWS,
        },
        label="rope/rotate",
    )


def _pairs(g: Graph, problem: Rope) -> None:
    """Two elements per invocation; fits everywhere."""
    x, x1, (stride, stride1) = problem.x, problem.x1, problem.strides
    g.launch(
        "rope/rotate.wgsl",
        x.rows * (stride + stride1) // 2,
        problem.tensors,
        {
            "stride": stride,
            "columns1": x1.columns if x1 is not None else 0,
            "stride1": stride1,
            "head_dim": problem.head_dim,
            "rotary_dim": problem.rotary_dim,
            "sign": problem.sign,
        },
        {"INTERLEAVED": problem.interleaved},
    )


ROPE = Kernel("rope", (Variant(_units_fits, _units), Variant(always, _pairs)))
KERNELS = (ROPE,)
