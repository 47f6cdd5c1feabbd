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
        keys, values = (
            g.float32(f"d {name} of every head", problem.q.rows, problem.q.columns)
            for name in ("dk", "dv")
        )
        self._launch(g, problem, "dkdv", problem.heads, {**tensors, "dk": keys, "dv": values})
        _sum_heads(g, problem, {"keys": keys, "values": values, "dk": dk, "dv": dv})


def is_per_head(profile: Profile, problem: Attention) -> bool:
    """Whether heads that share keys have workgroups of their own, since there are few.

    Half as many do as of products, since each has much to do.
    """
    blocks = ceil_div(problem.seq, _ROWS) * problem.kv_heads * problem.batch
    return problem.group > 1 and blocks < profile.least_workgroups // 2


def _sum_heads(g: Graph, problem: Attention, tensors: Mapping[str, Tensor]) -> None:
    unit = 4 if problem.head_dim % 4 == 0 else 2
    rows, stride = problem.k.rows, tensors["dk"].units(unit)
    g.launch(
        "attention/sum_heads.wgsl",
        rows * stride,
        tensors,
        {
            "rows": rows,
            "heads": problem.heads,
            "group": problem.group,
            "stride": tensors["keys"].units(unit),
            "sum_stride": stride,
        },
        {"HEAD_UNIT4": unit == 4, "UNITS": problem.head_dim // unit},
    )
