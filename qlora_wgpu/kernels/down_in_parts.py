"""LoRA's u of what a launch for new tokens makes, by that launch: each workgroup has a part of it.

The parts are one below the other, and who reads u adds them up in their order. They are sums of a
workgroup's own columns, so a row's do not depend on the rows beside it.
"""

from __future__ import annotations

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.tensor import Tensor

NO_PARTS: dict[str, int | float] = {
    "ranks": 0,
    "a_stride": 0,
    "parts_stride": 0,
    "parts_scale": 0.0,
}
"""What kernels that can make parts are told where they make none."""

_ATTENTION = "kv_cache/attend.wgsl"
_GLU = "few_rows/strips_glu.wgsl"
_MOST_RANKS = 16  # beyond which reading parts takes longer than a launch
_MOST_BOUND = 8  # storage buffers of a dispatch


def down_in_parts(g: Graph, x: Tensor, a: Tensor, scale: float) -> Tensor | None:
    """scale · x·aᵀ by the last launch, if it made x and has room.

    Args:
        g: The graph, without a backward.
        x: (rows, columns) operand.
        a: (ranks, columns) float32.
        scale: The factor of the sums.

    Returns:
        (parts · rows, ranks) float32; None where nothing has changed.
    """
    launch = g.last_made(_ATTENTION, x) or g.last_made(_GLU, x)
    if launch is None or a.rows > _MOST_RANKS or a.dtype != "float32":
        return None
    if sum(not tensor.texture for tensor in launch.tensors.values()) + 2 > _MOST_BOUND:
        return None
    parts, unit = _cut(launch)
    u = g.float32("parts of lora u", parts * x.rows, a.rows)
    launch.tensors |= {"a": a, "parts": u}
    launch.values = {
        **launch.values,
        "ranks": a.rows,
        "a_stride": a.units(unit),
        "parts_stride": u.units(4),
        "parts_scale": scale,
    }
    launch.specialize()
    return u


def _cut(launch: Launch) -> tuple[int, int]:
    """How many parts a launch makes, and the elements that it reads of a row at a time."""
    if launch.path == _GLU:
        return launch.workgroups[0], 4
    return int(launch.values["heads"]), 4 if launch.constants["HEAD_UNIT4"] else 2
