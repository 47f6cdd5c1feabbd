"""Rotary embedding's kernels."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.launch import GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.kernel import Kernel


@dataclass(frozen=True)
class Rope:
    """Every head of x, rotated by its token's position, into y.

    Attributes:
        x: (rows, heads · head_dim).
        y: Like x.
        table: float32 (positions, rotary_dim / 2) of (cos, sin).
        positions: uint32 (rows).
        head_dim: Elements of a head; even.
        rotary_dim: How many of them are rotated; even.
        interleaved: Whether pairs are neighbours, instead of half of rotary_dim apart.
        sign: 1 rotates, -1 rotates back.
    """

    x: Tensor
    y: Tensor
    table: Tensor
    positions: Tensor
    head_dim: int
    rotary_dim: int
    interleaved: bool
    sign: float

    def __post_init__(self) -> None:
        """Refuses heads that are not there."""
        if (
            self.x.shape != self.y.shape
            or self.x.columns % self.head_dim
            or self.head_dim % 2
            or self.rotary_dim > self.head_dim
            or self.rotary_dim % 2
        ):
            raise GraphError(
                f"rope: {self.x} has no heads of {self.head_dim} elements, "
                f"{self.rotary_dim} of them rotated in pairs"
            )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the kernels are bound to."""
        return {"positions": self.positions, "table": self.table, "x": self.x, "y": self.y}


class Units:
    """Units of eight elements; software GPUs read the table from a texture."""

    def fits(self, problem: Rope, profile: Profile) -> bool:
        """Whether heads and their rotated halves are whole units of eight."""
        whole = problem.head_dim % 8 == 0 and problem.rotary_dim % 16 == 0
        return whole and not problem.interleaved

    def launch(self, g: Graph, problem: Rope) -> None:
        """Adds one launch."""
        x, heads = problem.x, problem.x.columns // problem.head_dim
        head, half = problem.head_dim // 8, problem.rotary_dim // 16
        g.launch(
            "rope/rotate_units.wgsl",
            x.rows * heads * (head - half),
            problem.tensors,
            {"rows": x.rows, "stride": x.units(8), "sign": problem.sign},
            {"HEADS": heads, "HEAD": head, "HALF": half, "TABLE_TEXTURE": g.profile.textures},
            label="rope/rotate",
        )


class Pairs:
    """Two elements an invocation; fits everywhere."""

    def fits(self, problem: Rope, profile: Profile) -> bool:
        """Always."""
        return True

    def launch(self, g: Graph, problem: Rope) -> None:
        """Adds one launch."""
        x = problem.x
        g.launch(
            "rope/rotate.wgsl",
            x.rows * x.units(2),
            problem.tensors,
            {
                "rows": x.rows,
                "columns": x.columns,
                "stride": x.stride,
                "head_dim": problem.head_dim,
                "rotary_dim": problem.rotary_dim,
                "sign": problem.sign,
            },
            {"INTERLEAVED": problem.interleaved},
        )


ROPE = Kernel("rope", (Units(), Pairs()))
KERNELS = (ROPE,)
