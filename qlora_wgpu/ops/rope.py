"""Rotary position embedding (Su et al., 2021), half-split as in Llama or interleaved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.rope import ROPE, Rope
from qlora_wgpu.ops.batch import BatchBuffers


def rope(
    g: Graph,
    xs: Sequence[Tensor],
    table: Tensor,
    batch: BatchBuffers,
    head_dim: int,
    rotary_dim: int,
    *,
    interleaved: bool = False,
    rows: Tensor | None = None,
) -> list[Tensor]:
    """Rotates every head of queries, and of keys, by its token's position.

    xs is one or two matrices (rows, heads · head_dim); the results are operands. Two are one launch
    if launches are expensive. The first ``rotary_dim`` elements of a head are rotated, in pairs
    half of that apart or ``interleaved``, by a row of the float32 table (positions, rotary_dim / 2)
    of (cos, sin): the token's position, or its entry in ``rows``.
    """
    if not 1 <= len(xs) <= 2:
        raise GraphError(f"rope: expected one or two tensors, got {len(xs)}")
    if len(xs) == 2 and not (g.profile.fused_linears or batch.decodes):
        how: Any = {"interleaved": interleaved, "rows": rows}
        (q,) = rope(g, xs[:1], table, batch, head_dim, rotary_dim, **how)
        return [q, *rope(g, xs[1:], table, batch, head_dim, rotary_dim, **how)]
    positions = batch.positions if rows is None else rows

    def rotated(sources: Sequence[Tensor], names: Sequence[str], sign: float) -> list[Tensor]:
        ys = [g.operand(name, x.rows, x.columns) for name, x in zip(names, sources, strict=True)]
        second = (sources[1], ys[1]) if len(ys) == 2 else (None, None)
        problem = Rope(
            sources[0], ys[0], table, positions, head_dim, rotary_dim, interleaved, sign, *second
        )
        ROPE.launch(g, problem)
        return ys

    def vjp(gradients: list[Tensor | None]) -> None:
        given = [(x, dy) for x, dy in zip(xs, gradients, strict=True) if dy is not None]
        names = [f"d {x.name}" for x, _ in given]
        dxs = rotated([dy for _, dy in given], names, -1.0)
        for (x, _), dx in zip(given, dxs, strict=True):
            g.add_gradient(x, dx)

    def recompute() -> list[Tensor]:
        return rotated([g.rematerialize(x) for x in xs], [f"rope({x.name})" for x in xs], 1.0)

    ys = rotated(xs, [f"rope({x.name})" for x in xs], 1.0)
    g.record_jointly(ys, xs, vjp)
    if all(g.is_rematerialized(x) for x in xs):  # else xs would have to be kept
        g.set_joint_remat_rule(ys, recompute)
    return ys
