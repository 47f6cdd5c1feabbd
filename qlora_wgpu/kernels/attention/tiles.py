"""Attention through workgroup memory: 16 KiB and 256 invocations, which all adapters grant.

A workgroup takes 64 queries, or keys, of one head, and passes the others through its memory 64 at a
time. No invocation holds a whole head, so registers last for heads of any size.
"""

from __future__ import annotations

from qlora_wgpu.gpu.matrix import Limits
from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.kernels.attention.blocks import Cut
from qlora_wgpu.kernels.attention.per_head import PerHead, is_per_head
from qlora_wgpu.kernels.attention.problem import Attention

# As common/attention_tiles.wgsl has them.
_BLOCK = 64  # rows of a tile
_LANES = 16  # invocations that share a row
_SIDE = 128  # invocations that stage a side
_CHUNK = 8  # fours of a head that products take at a time, at most
_HALF_CHUNK = 5  # where both products' rows are there at once
_PLACES = 128  # fours of columns, of every fourth row, that have room beside the rows' weights
_NEEDED = Limits(256, 16 << 10)


class WorkgroupTiles(PerHead):
    """For GPUs: tiles of all operands pass through workgroup memory."""

    suffix = "_tiled"

    def fits(self, problem: Attention, profile: Profile) -> bool:
        """Where the profile asks for it, or for matrix units, within its limits."""
        return profile.attention_kind in ("tiled", "matrix") and _NEEDED.within(profile.limits)

    def _cut(self, profile: Profile, problem: Attention, name: str) -> Cut:
        unit, units = self._unit(problem), ceil_div(problem.head_dim, 4)
        # Sums of 128 columns of dk and dv, or of 256 of anything else, fit into registers.
        spans = ceil_div(units, 32 if name == "dkdv" else 64)
        span = ceil_div(units, spans)
        few = profile.attention_few_registers
        halves = few and name != "forward" and span > _LANES
        chunk = ceil_div(units, ceil_div(units, _HALF_CHUNK if halves else _CHUNK))
        by_row = few and span > 2 * _LANES
        own = 2 if name == "forward" and span <= 16 and not few else 1
        lines = _BLOCK // 4 // own
        rows = next(n for n in (8, 4, 2) if n * span <= _PLACES)
        threads = _LANES * lines
        constants: dict[str, Constant] = {
            "THREADS": threads,
            "HEAD_UNIT4": unit == 4,
            "HEAD_UNITS": problem.head_dim // unit,
            "UNITS": units,
            "CHUNK": chunk,
            "SPAN": span,
            "SPANS": spans,
            "COLUMNS": ceil_div(span, _LANES),
            "ROWS": rows,
            "OWN": own,
            "LANES": _LANES,
            "LINES": lines,
            "PRODUCTS": 1 if name == "forward" else 2,
            "MIXES": 2 if name == "dkdv" else 1,
            "BOTH": threads == _SIDE,
            "FEW_REGISTERS": few,
            "HALVES": halves,
            "ROW_BY_ROW": by_row,
            "TOGETHER": 1 if by_row else 4,
            "MIXED_LOADS": ceil_div(4 * rows * span, threads),
        }
        if name == "dkdv":
            constants["PER_HEAD"] = is_per_head(profile, problem)
        return Cut(_BLOCK, constants, spans)
