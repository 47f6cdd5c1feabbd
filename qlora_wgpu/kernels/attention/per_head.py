"""dk and dv of each query head apart, where too few heads of keys would leave a GPU idle."""

from __future__ import annotations

from collections.abc import Mapping

from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.attention.blocks import Blocks
from qlora_wgpu.kernels.attention.problem import Attention

_ROWS = 64  # keys of a workgroup, by which they are counted


class PerHead(Blocks):
    """A kernel of dk and dv that knows the constant PER_HEAD."""

    def _keys(
        self, g: Graph, problem: Attention, tensors: Mapping[str, Tensor], dk: Tensor, dv: Tensor
    ) -> None:
        if not is_per_head(g.profile, problem):
            super()._keys(g, problem, tensors, dk, dv)
            return
        parts = {
            name: g.float32(f"d {name} of every head", problem.q.rows, problem.q.columns)
            for name in ("dk", "dv")
        }
        self._launch(g, problem, "dkdv", problem.heads, {**tensors, **parts})
        for name, total in (("dk", dk), ("dv", dv)):
            _sum_heads(g, problem, parts[name], total)


def is_per_head(profile: Profile, problem: Attention) -> bool:
    """Whether heads that share keys have workgroups of their own, since there are few.

    Half as many do as of products, since each has much to do.
    """
    blocks = ceil_div(problem.seq, _ROWS) * problem.kv_heads * problem.batch
    return problem.group > 1 and blocks < profile.least_workgroups // 2


def _sum_heads(g: Graph, problem: Attention, parts: Tensor, total: Tensor) -> None:
    unit = 4 if problem.head_dim % 4 == 0 else 2
    g.launch(
        "attention/sum_heads.wgsl",
        total.rows * total.units(unit),
        {"x": parts, "y": total},
        {
            "rows": total.rows,
            "heads": problem.heads,
            "group": problem.group,
            "x_stride": parts.units(unit),
            "y_stride": total.units(unit),
        },
        {"HEAD_UNIT4": unit == 4, "UNITS": problem.head_dim // unit},
    )
