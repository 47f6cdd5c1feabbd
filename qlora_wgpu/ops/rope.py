"""Rotary position embedding (Su et al., 2021), half-split as in Llama or interleaved."""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.rope import ROPE, Rope
from qlora_wgpu.ops.batch import BatchBuffers


def rope(
    g: Graph,
    x: Tensor,
    table: Tensor,
    batch: BatchBuffers,
    head_dim: int,
    rotary_dim: int,
    *,
    interleaved: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """Rotates every head of x by its token's position.

    Args:
        g: The graph.
        x: (rows, heads · head_dim).
        table: float32 (positions, rotary_dim / 2) of (cos, sin).
        batch: Whose ``positions`` are used, where no ``rows`` are given.
        head_dim: Elements of a head; even.
        rotary_dim: How many of them are rotated.
        interleaved: Whether pairs are neighbours, instead of half of rotary_dim apart.
        rows: Which row of the table each row of x is rotated by, instead of that of its position.

    Returns:
        (rows, heads · head_dim) operand.

    Raises:
        GraphError: If x has no such heads.
    """

    def rotated(source: Tensor, name: str, sign: float) -> Tensor:
        y = g.operand(name, x.rows, x.columns)
        positions = batch.positions if rows is None else rows
        problem = Rope(source, y, table, positions, head_dim, rotary_dim, interleaved, sign)
        ROPE.launch(g, problem)
        return y

    y = rotated(x, f"rope({x.name})", 1.0)
    g.record(y, [x], lambda dy: g.add_gradient(x, rotated(dy, f"d {x.name}", -1.0)))
    return y
