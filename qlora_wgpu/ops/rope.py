"""Rotary position embedding (Su et al., 2021), in Hugging Face's half-split form."""

from __future__ import annotations

from qlora_wgpu.gpu.device import fold_workgroups
from qlora_wgpu.graph.graph import Graph, ceil_div
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.batch import Batch


def rope(
    g: Graph, x: Tensor, table: Tensor, batch: Batch, head_dim: int, rotary_dim: int
) -> Tensor:
    """Rotates every head of x by its token's position.

    Args:
        g: The graph.
        x: (rows, heads · head_dim) operand.
        table: float32 (positions, rotary_dim / 2) of (cos, sin).
        batch: Whose ``positions`` are used.
        head_dim: Elements of a head; even.
        rotary_dim: How many of them are rotated.

    Returns:
        (rows, heads · head_dim) operand.
    """
    y = g.operand(f"rope({x.name})", x.rows, x.columns)

    def rotate(source: Tensor, target: Tensor, sign: float) -> None:
        g.launch(
            "rope/rotate.wgsl",
            fold_workgroups(ceil_div(x.rows * x.units(2), 64)),
            {"positions": batch.positions, "table": table, "x": source, "y": target},
            {
                "rows": x.rows,
                "columns": x.columns,
                "stride": x.stride,
                "head_dim": head_dim,
                "rotary_dim": rotary_dim,
                "sign": sign,
            },
            {"BF16": g.bf16},
        )

    rotate(x, y, 1.0)

    def vjp(dy: Tensor) -> None:
        dx = g.operand(f"d {x.name}", x.rows, x.columns)
        rotate(dy, dx, -1.0)
        g.hand_over(x, dx)

    g.record(y, [x], vjp)
    return y
