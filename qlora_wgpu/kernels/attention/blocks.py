"""Attention in blocks of queries, or of keys, of one head; and kernels without workgroup memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ceil_div, round_up
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.attention.problem import Attention, Gradients

# Straight-line code is kept within what software adapters compile quickly: multiply-adds a turn.
_FORWARD_BODY = 512
_BACKWARD_BODY = 768
_HEAD_OF_TWO = 64  # elements of a head of which an invocation takes two queries, at most


# Products over every query and the keys up to it, of each kernel.
_PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}


@dataclass(frozen=True)
class Cut:
    """How a kernel's work is cut.

    Attributes:
        block: Queries, or keys, of a workgroup.
        constants: The shader's, besides those that all have.
        spans: Workgroups that share a block of a head, each with some columns of the results.
    """

    block: int
    constants: dict[str, Constant]
    spans: int = 1

    def turns(self, name: str, problem: Attention) -> int:
        """Most turns that the loops of an invocation take, over keys, or over heads' queries."""
        seen = min(problem.seq, problem.window + self.block)
        heads = problem.group if name == "dkdv" else 1
        return heads * ceil_div(seen, int(self.constants.get("KEYS", 1)))


class Blocks(ABC):
    """The launches, which the variants share."""

    suffix = ""

    def launch(self, g: Graph, problem: Attention) -> None:
        """Adds the launches of the forward, or of the backward."""
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
        pairs = round_up(rows * heads, 2)  # of which a texel holds two
        lse_delta = g.float_vector("lse and delta", 2 * pairs)
        g.launch(
            "attention/delta.wgsl",
            rows * heads,
            {"o": problem.o, "dout": dout, "lse": problem.lse, "lse_delta": lse_delta},
            {"rows": rows, "heads": heads, "stride": problem.q.units(unit), "units": units},
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
        unit, cut = self._unit(problem), self._cut(g.profile, problem, name)
        inputs = {n: getattr(problem, n) for n in ("q", "k", "v", "segments")}
        g.launch(
            f"attention/{name}{self.suffix}.wgsl",
            (ceil_div(problem.seq, cut.block) * cut.spans, heads, problem.batch),
            {**inputs, **tensors},
            {
                "rows": problem.q.rows,
                "seq": problem.seq,
                "heads": problem.heads,
                "group": problem.group,
                "q_stride": problem.q.units(unit),
                "kv_stride": problem.k.units(unit),
                "window": problem.window,
                "scale": problem.scale,
                "softcap": problem.softcap or 1.0,
            },
            {
                "BLOCK": cut.block,
                "SOFTCAP": problem.softcap is not None,
                "SEGMENT_TEXELS": False,
                **cut.constants,
            },
            flops=problem.flops(_PRODUCTS[name]),
            label=f"attention/{name}",
            turns=cut.turns(name, problem),
        )

    def _unit(self, problem: Attention) -> int:
        """Elements of a head that are read at a time."""
        return 4 if problem.head_dim % 4 == 0 else 2

    @abstractmethod
    def _cut(self, profile: Profile, problem: Attention, name: str) -> Cut:
        """How the kernel of this name is cut."""


class SubgroupTexture(Blocks):
    """Keys are read from textures by the invocations of a subgroup in turn, and broadcast."""

    suffix = "_texture"

    def fits(self, problem: Attention, profile: Profile) -> bool:
        """Whether kernels read textures, and heads are whole units of eight."""
        return profile.textures and problem.head_dim % 8 == 0

    def _unit(self, problem: Attention) -> int:
        return 8

    def _cut(self, profile: Profile, problem: Attention, name: str) -> Cut:
        """How many keys are loaded a turn, and how the invocations of a subgroup share them."""
        threads, head = profile.subgroup_size, problem.head_dim // 8
        body = _FORWARD_BODY if problem.gradients is None else _BACKWARD_BODY
        # What is broadcast serves two queries, where they still fit into the first cache.
        sets = 2 if name != "dkdv" and problem.head_dim <= _HEAD_OF_TWO else 1
        body //= 1 + profile.short_loops
        most = max(body // (_PRODUCTS[name] * problem.head_dim * sets), 1)
        keys = next(n for n in (8, 4, 2, 1) if n <= most and n <= threads)
        pieces = next(n for n in range(threads // keys, 0, -1) if head % n == 0)
        cut: dict[str, Constant] = {"THREADS": threads, "HEAD": head, "KEYS": keys}
        cut |= {"UNITS": head // pieces, "HOLDERS": pieces * keys}
        cut["SEGMENT_TEXELS"] = profile.in_textures
        return Cut(sets * threads, cut if name == "dkdv" else {**cut, "SETS": sets})


class Registers(Blocks):
    """An invocation holds a query or a key and reads the others by itself; fits everywhere."""

    def fits(self, problem: Attention, profile: Profile) -> bool:
        """Always."""
        return True

    def _cut(self, profile: Profile, problem: Attention, name: str) -> Cut:
        unit = self._unit(problem)
        constants: dict[str, Constant] = {
            "THREADS": profile.attention_threads,
            "HEAD_UNIT4": unit == 4,
            "UNITS": problem.head_dim // unit,
        }
        if problem.gradients is None:
            # Straight-line code is kept within what software adapters compile quickly.
            constants["KEYS"] = profile.attention_keys if problem.head_dim <= 32 * unit else 2
        return Cut(profile.attention_threads, constants)
