"""RMSNorm and LoRA's u of what it makes, by one launch, for new tokens.

A new token's kernels are so short that a launch costs as much as some of them compute: each
workgroup makes the norm of its row anew.
"""

from __future__ import annotations

from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.rowwise import row_constants

_NORM = "rms_norm/forward.wgsl"
_RANKS = 8  # that a workgroup makes
_MOST_RANKS = 64  # beyond them products of few rows are cut otherwise


def norm_and_down(g: Graph, x: Tensor, a: Tensor, u: Tensor, scale: float) -> bool:
    """Makes u = scale · x·aᵀ with x itself, where a plain RMSNorm made x last.

    Args:
        g: The graph, without a backward.
        x: (rows, columns) operand.
        a: (ranks, columns).
        u: (rows, ranks) float32.
        scale: The factor of u.

    Returns:
        Whether it did; else nothing has changed.
    """
    norm = g.last_made(_NORM, x)
    cut = row_constants(g)
    if norm is None or cut["ONE_THREAD"] or a.rows > _MOST_RANKS:
        return False
    if not norm.tensors.keys() <= {"x", "weight", "y", "rstd"}:
        return False
    g.take_back(_NORM, x)
    g.launch(
        "rms_norm/down.wgsl",
        (ceil_div(a.rows, _RANKS), x.rows, 1),
        {"x": norm.tensors["x"], "weight": norm.tensors["weight"], "y": x, "a": a, "u": u},
        {
            "columns": x.columns,
            "stride": x.units(8),
            "a_stride": a.units(8),
            "u_stride": u.units(4),
            "ranks": a.rows,
            "eps": norm.values["eps"],
            "scale": scale,
        },
        {name: cut[name] for name in ("THREADS", "ONE_THREAD", "SUBGROUP")},
        flops=2 * x.rows * a.rows * x.columns,
    )
    return True
