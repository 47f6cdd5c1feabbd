"""Copies in f16 of what attention on matrix units walks over and over, which it had to convert."""

from __future__ import annotations

from typing import Any

from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, matrix
from qlora_wgpu.kernels.attention.problem import Attention

SIZED_ROWS = 64  # share an entry of what says how large gradients and values are
_ROWS = 32  # of a workgroup
_THREADS = 64


def keys_and_values(
    g: Graph, problem: Attention, saturated: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """k and v as f16; what is beyond its end is held there, and counted if told where."""
    tensors = {} if saturated is None else {"saturated": saturated}
    return _factors(g, problem, ("k", problem.k), ("v", problem.v), tensors)


def queries_and_gradients(
    g: Graph, problem: Attention, dout: Tensor, lse_delta: Tensor
) -> tuple[Tensor, Tensor]:
    """q as f16, and dout times a power of two of each sequence and heads that share a key.

    Args:
        g: The graph.
        problem: What is computed.
        dout: The gradient of o.
        lse_delta: With the sizes, as ``delta_and_sizes`` gives it.
    """
    return _factors(g, problem, ("q", problem.q), ("dout", dout), {"lse_delta": lse_delta})


def _factors(
    g: Graph,
    problem: Attention,
    a: tuple[str, Tensor],
    b: tuple[str, Tensor],
    tensors: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:
    made = [matrix(f"{name} in f16", x.rows, x.columns, "float16") for name, x in (a, b)]
    params: dict[str, Any] = {
        "rows": problem.q.rows,
        "seq": problem.seq,
        "heads": problem.heads,
        "group": problem.group,
        "stride": a[1].units(8),
        "across": a[1].columns // problem.kv_heads // 8,
    }
    g.launch(
        "attention/factors.wgsl",
        (ceil_div(problem.seq, _ROWS), problem.kv_heads, problem.batch),
        {"a": a[1], "b": b[1], "a_factors": made[0], "b_factors": made[1], **tensors},
        params,
        {
            "BACKWARD": "lse_delta" in tensors,
            "ROWS": _ROWS,
            "SIZED": SIZED_ROWS,
            "THREADS": _THREADS,
        },
    )
    return made[0], made[1]
