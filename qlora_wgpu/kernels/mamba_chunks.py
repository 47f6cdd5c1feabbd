"""Mamba 2's scan on software GPUs: a subgroup per workgroup, and operands in textures.

All products of a chunk are computed as those of matrices: C·Bᵀ once per group, states in one launch
over the chunks, and then what depends on them for all chunks at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, ceil_div
from qlora_wgpu.kernels.common import sum_parts
from qlora_wgpu.kernels.mamba_scan import Block, MambaScan, blocks

_UNIT = 8  # elements that are read at once
_STATE_UNITS = 2  # maximum units of columns, by eight rows of a state, of an invocation
_OUTPUT_UNITS = 4  # maximum units of columns of an invocation's tokens
_GRADIENT_UNITS = 2  # units of an invocation's tokens of dB and dC
_MOST_SETS = 4  # maximum tokens of an invocation
_TOKENS = 32  # of a workgroup, if it has so many invocations


@dataclass(frozen=True)
class _Chunks:
    """The launches of a block of heads."""

    g: Graph
    block: Block

    @property
    def problem(self) -> MambaScan:
        return self.block.problem

    @property
    def params(self) -> dict[str, int | float]:
        p = self.problem
        return {
            **self.block.params,
            "state_units": p.state_size // _UNIT,
            "c_at": p.bc.columns // (2 * _UNIT),
            "head_units": p.head_dim // _UNIT,
            "state_stride": p.bc.units(_UNIT),
            "head_stride": p.x.units(_UNIT),
        }

    @property
    def constants(self) -> dict[str, Constant]:
        return _constants(self.g, self.problem)

    @property
    def blocks_of_tokens(self) -> int:
        """Workgroups of a head's or group's tokens."""
        tokens = int(self.constants["SETS"]) * int(self.constants["THREADS"])
        return self.problem.chunks * (self.problem.chunk // tokens)

    def tokens(self) -> Tensor:
        p = self.problem
        tokens = self.block.matrix(self.g, "tokens", 8)
        given = {"segments": p.segments, "dt": p.dt, "a_log": p.a_log, "d": p.d}
        threads = self.g.profile.subgroup_size
        self.g.launch(
            "mamba_scan/tokens.wgsl",
            (ceil_div(self.block.heads, threads), p.chunks, p.batch),
            {**given, "tokens": tokens},
            self.block.params,
            {"CHUNK": p.chunk, "THREADS": threads},
        )
        return tokens

    def states(self, values: Tensor, tokens: Tensor, **tensors: Tensor | None) -> Tensor:
        """The states before each chunk of x, or, if they are given as before, dS after it of dy."""
        p = self.problem
        rows = p.batch * self.block.heads * p.chunks * p.state_size
        states = self.g.float32("states", rows, p.head_dim)
        tiles, units = _split(p.head_dim // _UNIT, _STATE_UNITS)
        self.g.launch(
            "mamba_scan/states_texture.wgsl",
            (tiles * self.row_tiles, self.block.heads, p.batch),
            {"tokens": tokens, "bc": p.bc, "x": values, "states": states, **tensors},
            self.params,
            {**self.constants, "UNITS": units, "REVERSE": "before" in tensors},
            self.block.flops(1, 0),
            turns=p.chunks * (1 + p.chunk // 8),
        )
        return states

    @property
    def row_tiles(self) -> int:
        """Workgroups that share the rows of a state."""
        return ceil_div(self.problem.state_size // _UNIT, self.g.profile.subgroup_size)

    def outputs(
        self, y: Tensor, values: Tensor, tokens: Tensor, states: Tensor, pairs: Tensor,
        **tensors: Tensor,
    ) -> None:  # fmt: skip
        """Computes y, or, with x and direct, dx."""
        p = self.problem
        tiles, units = _split(p.head_dim // _UNIT, _OUTPUT_UNITS)
        own = {"bc": p.bc, "values": values, "y": y, **tensors}
        self.g.launch(
            "mamba_scan/outputs_texture.wgsl",
            (tiles * self.blocks_of_tokens, self.block.heads, p.batch),
            {"tokens": tokens, "states": states, "pairs": pairs, **own},
            self.params,
            {**self.constants, "UNITS": units, "REVERSE": "x" in tensors},
            self.block.flops(1, p.head_dim),
        )

    def pair_gradients(self, dy: Tensor, tokens: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of pairs, summed over the heads of a group, and their part of da."""
        g, p = self.g, self.problem
        members = min(p.group, self.block.heads)
        groups = self.block.heads // members
        dpairs = g.float32("d pairs", members * p.rows, groups * p.chunk)
        near = self.block.matrix(g, "near", self.blocks_of_tokens // p.chunks)
        g.launch(
            "mamba_scan/pair_gradients_texture.wgsl",
            (self.blocks_of_tokens, self.block.heads, p.batch),
            {"tokens": tokens, "pairs": pairs, "x": p.x, "dy": dy, "dpairs": dpairs, "near": near},
            self.params,
            self.constants,
            self.block.flops(0, p.head_dim),
        )
        if members == 1:
            return dpairs, near
        total = g.float32("d pairs", p.rows, groups * p.chunk)
        sum_parts(g, dpairs, total, members)
        return total, near

    def group_gradients(
        self, dbc: Tensor, values: Tensor, tokens: Tensor, states: Tensor, dpairs: Tensor,
        *, reverse: bool,
    ) -> Tensor:  # fmt: skip
        """Computes dC of dy and S, or reverse dB of x and dS, and returns its part of da."""
        p = self.problem
        tiles = ceil_div(p.state_size // _UNIT, _GRADIENT_UNITS)
        members = min(p.group, self.block.heads)
        far = self.block.matrix(self.g, "far", tiles)
        own = {"bc": p.bc, "values": values, "dpairs": dpairs, "dbc": dbc, "far": far}
        added = {"ACCUMULATE": self.block.first % p.group > 0}
        self.g.launch(
            "mamba_scan/group_gradients_texture.wgsl",
            (tiles * self.blocks_of_tokens, self.block.heads // members, p.batch),
            {"tokens": tokens, "states": states, **own},
            self.params,
            {**self.constants, **added, "REVERSE": reverse},
            self.block.flops(1, 0),
            turns=members * (1 + p.head_dim // _UNIT) + p.chunk // 8,
        )
        return far


def forward(
    g: Graph,
    problem: MambaScan,
    y: Tensor,
    last: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    """As ``mamba_scan.forward``."""
    pairs = _pairs(g, problem)
    for block in blocks(g, problem):
        chunks = _Chunks(g, block)
        tokens = chunks.tokens()
        states = chunks.states(problem.x, tokens, last=last, places=places)
        chunks.outputs(y, problem.x, tokens, states, pairs)


def backward(
    g: Graph, problem: MambaScan, dy: Tensor, dx: Tensor, dbc: Tensor, ddt: Tensor
) -> None:
    """As ``mamba_scan.backward``."""
    p = problem
    pairs, transposed = _pairs(g, p), _pairs(g, p, transposed=True)
    output_tiles, state_tiles = (
        _split(p.head_dim // _UNIT, most)[0] for most in (_OUTPUT_UNITS, _STATE_UNITS)
    )
    for block in blocks(g, p):
        chunks = _Chunks(g, block)
        tokens = chunks.tokens()
        states = chunks.states(p.x, tokens)
        per_chunk = state_tiles * chunks.row_tiles
        sums = g.float_vector("sums", p.batch * block.heads * p.chunks * per_chunk)
        dstates = chunks.states(dy, tokens, before=states, sums=sums)
        direct = block.matrix(g, "direct", output_tiles)
        chunks.outputs(dx, dy, tokens, dstates, transposed, x=p.x, direct=direct)
        dpairs, near = chunks.pair_gradients(dy, tokens, pairs)
        far_c = chunks.group_gradients(dbc, dy, tokens, states, dpairs, reverse=False)
        far_b = chunks.group_gradients(dbc, p.x, tokens, dstates, dpairs, reverse=True)
        parts: dict[str, Constant] = {
            "SUMS": per_chunk,
            "DIRECT": output_tiles,
            "FAR": ceil_div(p.state_size // _UNIT, _GRADIENT_UNITS),
        }
        own = {"near": near, "direct": direct, "far_c": far_c, "far_b": far_b, "sums": sums}
        g.launch(
            "mamba_scan/dt_gradients_texture.wgsl",
            (ceil_div(block.heads, g.profile.subgroup_size), p.chunks, p.batch),
            {"tokens": tokens, **own, "a_log": p.a_log, "ddt": ddt},
            chunks.params,
            {**chunks.constants, **parts},
        )


def _pairs(g: Graph, p: MambaScan, *, transposed: bool = False) -> Tensor:
    """C·Bᵀ of each chunk's tokens, (rows, groups · chunk), or the transposed matrices."""
    name = "transposed pairs" if transposed else "pairs"
    pairs = g.float32(name, p.rows, p.groups * p.chunk)
    b_at, c_at = 0, p.bc.columns // (2 * _UNIT)
    own_at, other_at = (b_at, c_at) if transposed else (c_at, b_at)
    at = {"own_at": own_at, "other_at": other_at}
    constants = _constants(g, p)
    del constants["SETS"]
    g.launch(
        "mamba_scan/pairs_texture.wgsl",
        (ceil_div(p.seq, g.profile.subgroup_size), p.groups, p.batch),
        {"bc": p.bc, "pairs": pairs},
        {"seq": p.seq, "groups": p.groups, "state_units": p.state_size // _UNIT, **at},
        constants,
        2 * p.rows * p.groups * p.chunk * p.state_size,
    )
    return pairs


def _constants(g: Graph, p: MambaScan) -> dict[str, Constant]:
    threads = g.profile.subgroup_size
    span = min(threads, _UNIT)
    sets = min(max(_TOKENS // threads, 1), _MOST_SETS, p.chunk // threads)
    return {
        "CHUNK": p.chunk,
        "THREADS": threads,
        "SPAN": span,
        "BLOCKS": _UNIT // span,
        "SETS": sets,
    }


def _split(units: int, most: int) -> tuple[int, int]:
    """Tiles of at most so many units, all alike if possible, and units of each."""
    tiles = ceil_div(units, most)
    return tiles, ceil_div(units, tiles)
