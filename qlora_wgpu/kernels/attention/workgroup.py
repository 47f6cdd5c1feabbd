"""Attention through workgroup memory or by single invocations, in blocks of queries or keys.

A workgroup processes 64 queries, or keys, of one head, and loads the others through workgroup
memory, 64 at a time. No invocation holds a whole head, so registers suffice for heads of any size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.matrix import Limits
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, ceil_div, round_up
from qlora_wgpu.kernels.attention.problem import Attention, Gradients

# Multiply-adds per iteration: limits straight-line code to what software GPUs compile quickly.
_FORWARD_BODY = 512
_BACKWARD_BODY = 768
_HEAD_OF_TWO = 64  # maximum elements of a head for two queries per invocation


# Products over every query and the keys up to it, of each kernel.
_PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}


@dataclass(frozen=True)
class Tiling:
    """A kernel's tiling."""

    block: int  # queries, or keys, per workgroup
    constants: dict[str, Constant]  # the shader's, besides the common ones
    spans: int = 1  # workgroups per block of a head, each with some columns of the results

    def turns(self, name: str, problem: Attention) -> int:
        """Maximum loop iterations of an invocation, over keys, or over heads' queries."""
        reach = problem.seq if problem.blocks else problem.window + self.block
        seen = min(problem.seq, reach)
        heads = problem.group if name == "dkdv" else 1
        return heads * ceil_div(seen, int(self.constants.get("KEYS", 1)))


class Blocks(ABC):
    """The launches shared by the variants."""

    suffix = ""

    def launch(self, g: Graph, problem: Attention) -> None:
        if problem.gradients is None:
            tensors = {"o": problem.o, "lse": problem.lse, "sinks": problem.sinks}
            self._launch(g, problem, "forward", problem.heads, tensors)
        else:
            self._backward(g, problem, problem.gradients)

    def _backward(self, g: Graph, problem: Attention, gradients: Gradients) -> None:
        lse_delta = self._delta(g, problem, gradients.dout)
        tensors = {"dout": gradients.dout, "lse_delta": lse_delta}
        if gradients.dq is not None:
            self._launch(g, problem, "dq", problem.heads, {**tensors, "dq": gradients.dq})
        if gradients.dk is not None and gradients.dv is not None:
            self._keys(g, problem, tensors, gradients.dk, gradients.dv)

    def _keys(
        self, g: Graph, problem: Attention, tensors: Mapping[str, Tensor], dk: Tensor, dv: Tensor
    ) -> None:
        self._launch(g, problem, "dkdv", problem.kv_heads, {**tensors, "dk": dk, "dv": dv})

    def _delta(self, g: Graph, problem: Attention, dout: Tensor) -> Tensor:
        rows, heads, unit = problem.q.rows, problem.heads, self._unit(problem)
        units = problem.head_dim // unit
        pairs = round_up(rows * heads, 2)  # a texel holds two
        lse_delta = g.float_vector("lse and delta", 2 * pairs)
        g.launch(
            "attention/delta.wgsl",
            rows * heads,
            {"o": problem.o, "dout": dout, "lse": problem.lse, "lse_delta": lse_delta},
            {"rows": rows, "heads": heads, "units": units},
            {
                "HEAD_UNIT8": unit == 8,
                "HEAD_UNIT4": unit == 4,
                "UNITS": units,
                "UNIT_BY_UNIT": g.profile.unit_by_unit == 1,
            },
        )
        return lse_delta

    def _launch(
        self,
        g: Graph,
        problem: Attention,
        name: str,
        heads: int,
        tensors: Mapping[str, Tensor | None],
    ) -> None:
        tiling = self._tiling(g.profile, problem, name)
        inputs = {n: getattr(problem, n) for n in ("q", "k", "v", "segments")}
        g.launch(
            f"attention/{name}{self.suffix}.wgsl",
            (ceil_div(problem.seq, tiling.block) * tiling.spans, heads, problem.batch),
            {**inputs, **tensors},
            {
                "seq": problem.seq,
                "heads": problem.heads,
                "group": problem.group,
                "window": problem.window,
                "scale": problem.scale,
                "softcap": problem.softcap or 1.0,
            },
            {
                "BLOCK": tiling.block,
                "SOFTCAP": problem.softcap is not None,
                "SEGMENT_TEXELS": False,
                **({"BLOCKS": True} if problem.blocks else {}),
                **tiling.constants,
            },
            flops=problem.flops(_PRODUCTS[name]),
            label=f"attention/{name}",
            turns=tiling.turns(name, problem),
        )

    def _unit(self, problem: Attention) -> int:
        return 4 if problem.head_dim % 4 == 0 else 2

    @abstractmethod
    def _tiling(self, profile: Profile, problem: Attention, name: str) -> Tiling:
        """The tiling of the kernel of this name."""


class SubgroupTexture(Blocks):
    """A subgroup's invocations take turns to read keys from textures and broadcast them."""

    suffix = "_texture"

    def fits(self, problem: Attention, profile: Profile) -> bool:
        return profile.textures and problem.head_dim % 8 == 0

    def _unit(self, problem: Attention) -> int:
        return 8

    def _tiling(self, profile: Profile, problem: Attention, name: str) -> Tiling:
        threads, head = profile.subgroup_size, problem.head_dim // 8
        body = _FORWARD_BODY if problem.gradients is None else _BACKWARD_BODY
        # A broadcast serves two queries if they still fit the first-level cache.
        sets = 2 if name != "dkdv" and problem.head_dim <= _HEAD_OF_TWO else 1
        body //= 1 + profile.short_loops
        most = max(body // (_PRODUCTS[name] * problem.head_dim * sets), 1)
        keys = next(n for n in (8, 4, 2, 1) if n <= most and n <= threads)
        pieces = next(n for n in range(threads // keys, 0, -1) if head % n == 0)
        tiling: dict[str, Constant] = {"THREADS": threads, "HEAD": head, "KEYS": keys}
        tiling |= {"UNITS": head // pieces, "HOLDERS": pieces * keys}
        tiling["SEGMENT_TEXELS"] = profile.in_textures
        return Tiling(sets * threads, tiling if name == "dkdv" else {**tiling, "SETS": sets})


class Registers(Blocks):
    """Each invocation holds a query or a key and reads the others itself; fits everywhere."""

    def fits(self, problem: Attention, profile: Profile) -> bool:
        return True

    def _tiling(self, profile: Profile, problem: Attention, name: str) -> Tiling:
        unit = self._unit(problem)
        constants: dict[str, Constant] = {
            "THREADS": profile.attention_threads,
            "HEAD_UNIT4": unit == 4,
            "UNITS": problem.head_dim // unit,
        }
        if problem.gradients is None:
            # Limits straight-line code to what software GPUs compile quickly.
            constants["KEYS"] = profile.attention_keys if problem.head_dim <= 32 * unit else 2
        return Tiling(profile.attention_threads, constants)


_ROWS = 64  # keys per workgroup, for counting workgroups


class PerHead(Blocks):
    """Kernels of dk and dv with the constant PER_HEAD."""

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
    """Whether heads that share keys have separate workgroups, since there are few.

    The threshold is half that of products, since each workgroup has much work.
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


# As in common/attention_tiles.wgsl.
_BLOCK = 64  # rows of a tile
_LANES = 16  # invocations that share a row
_SIDE = 128  # invocations that stage a side
_CHUNK = 8  # maximum fours of a head per product
_HALF_CHUNK = 5  # if both products' rows are loaded at once
_PLACES = 128  # fours of columns, of every fourth row, that fit next to the rows' weights
_NEEDED = Limits(256, 16 << 10)


class WorkgroupTiles(PerHead):
    """For GPUs: tiles of all operands pass through workgroup memory."""

    suffix = "_tiled"

    def fits(self, problem: Attention, profile: Profile) -> bool:
        """Whether the profile asks for it, or for matrix units, within its limits."""
        return profile.attention_kind in ("tiled", "matrix") and _NEEDED.within(profile.limits)

    def _tiling(self, profile: Profile, problem: Attention, name: str) -> Tiling:
        unit, units = self._unit(problem), ceil_div(problem.head_dim, 4)
        # Sums of 128 columns of dk and dv, or of 256 of other results, fit registers.
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
        return Tiling(_BLOCK, constants, spans)
