"""Mamba 2's selective scan in chunks of tokens: the problem and its launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor, ceil_div

CHUNK = 64
_SOFTWARE_CHUNK = 32  # without textures, where products of token pairs cost more than states
_STATE = 512  # vectors of four of a head's state in workgroup memory
_LANES = 4  # maximum columns of these
_GRADIENT_LANES = 16  # invocations that share four tokens of a gradient
_STEP_PARTS = 16  # invocations that share a column of the state in a step
_BLOCK_BYTES = 128 << 20  # maximum bytes of an intermediate of heads that are launched together


@dataclass(frozen=True)
class MambaScan:
    """Mamba 2's scan over packed samples."""

    x: Tensor  # (batch · seq, heads · head_dim)
    bc: Tensor  # (batch · seq, 2 · groups · state_size): B of all groups, then C
    dt: Tensor  # (batch · seq, heads) float32
    a_log: Tensor  # (heads) float32
    d: Tensor  # (heads) float32
    segments: Tensor  # uint32 (batch · seq): the tokens' samples
    batch: int  # sequences
    heads: int
    state_size: int  # elements of B and C of a group, a multiple of 8
    chunk: int = CHUNK  # tokens of a chunk: 16, 32 or 64

    def __post_init__(self) -> None:
        if self.state_size > _STATE or self.chunk not in (16, 32, 64):
            raise GraphError(f"mamba_scan: {self.state_size} rows, chunks of {self.chunk}")

    @property
    def rows(self) -> int:
        return self.x.rows

    @property
    def seq(self) -> int:
        return self.rows // self.batch

    @property
    def chunks(self) -> int:
        return ceil_div(self.seq, self.chunk)

    @property
    def head_dim(self) -> int:
        return self.x.columns // self.heads

    @property
    def groups(self) -> int:
        return self.bc.columns // (2 * self.state_size)

    @property
    def group(self) -> int:
        """Heads that share B and C."""
        return self.heads // self.groups

    @property
    def sizes(self) -> dict[str, int | float]:
        return {
            "group": self.group,
            "state_units": self.state_size // 4,
            "c_at": self.bc.columns // 8,
            "head_units": self.head_dim // 4,
        }


@dataclass(frozen=True)
class Block:
    """Neighbouring heads that are launched together: of one group, or whole groups."""

    problem: MambaScan
    first: int
    heads: int

    @property
    def params(self) -> dict[str, int | float]:
        p = self.problem
        return {
            **p.sizes,
            "seq": p.seq,
            "chunks": p.chunks,
            "heads": self.heads,
            "first_head": self.first,
            "state_stride": p.bc.units(4),
            "head_stride": p.x.units(4),
            "dt_stride": p.dt.stride,
        }

    @property
    def constants(self) -> dict[str, Constant]:
        return {"CHUNK": self.problem.chunk}

    def of_chunks(self, blocks: int) -> tuple[int, int, int]:
        return self.problem.chunks, blocks, self.problem.batch

    def of_pairs(self) -> dict[str, Constant]:
        """The tiling of kernels over pairs of four tokens of a chunk."""
        return {**self.constants, "THREADS": (self.problem.chunk // 4) ** 2}

    def of_states(self) -> tuple[tuple[int, int, int], dict[str, Constant]]:
        """Workgroups and tiling of kernels that iterate over chunks."""
        p = self.problem
        lanes = min(_LANES, 1 << (_STATE // p.state_size).bit_length() - 1)
        tiling: dict[str, Constant] = {
            **self.constants,
            "LANES": lanes,
            "STATE": p.state_size * lanes,
            "THREADS": p.chunk // 4 * lanes,
        }
        return (ceil_div(p.head_dim // 4, lanes), self.heads, p.batch), tiling

    def turns(self, tiling: dict[str, Constant]) -> int:
        """Maximum loop iterations of an invocation that iterates over chunks."""
        p, threads = self.problem, int(tiling["THREADS"])
        fours = ceil_div(p.state_size // 4 * int(tiling["LANES"]), threads)  # of the state
        return p.chunks * (p.state_size // 4 + p.chunk + fours * (5 + p.chunk))

    def flops(self, state: int, near: int) -> int:
        """Operations of products with the state, and ``near`` columns of token pairs."""
        p = self.problem
        return 2 * p.rows * self.heads * (state * p.state_size * p.head_dim + p.chunk * near // 2)

    def matrix(self, g: Graph, name: str, size: int) -> Tensor:
        """A float32 intermediate, (rows, heads · size)."""
        return g.float32(name, self.problem.rows, self.heads * size)

    def prepare(self, g: Graph) -> tuple[Tensor, Tensor]:
        """Launches what depends only on tokens of the same chunk."""
        p = self.problem
        tokens, pairs = self.matrix(g, "tokens", 8), self.matrix(g, "pairs", p.chunk)
        given = {"segments": p.segments, "bc": p.bc, "dt": p.dt, "a_log": p.a_log, "d": p.d}
        g.launch(
            "mamba_scan/prepare.wgsl",
            self.of_chunks(self.heads),
            {**given, "tokens": tokens, "pairs": pairs},
            self.params,
            self.of_pairs(),
            self.flops(0, p.state_size),
        )
        return tokens, pairs


def tokens_of_chunk(profile: Profile) -> int:
    return _SOFTWARE_CHUNK if profile.is_software and not profile.textures else CHUNK


def forward(
    g: Graph,
    problem: MambaScan,
    y: Tensor,
    last: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    """Computes y, like x, and the state after the last token.

    If given, ``last`` is (sequences · heads · state_size, head_dim) float32; the part of the
    sequence in ``places`` is overwritten.
    """
    p = problem
    for block in blocks(g, p):
        tokens, pairs = block.prepare(g)
        workgroups, tiling = block.of_states()
        tensors = {"tokens": tokens, "pairs": pairs, "bc": p.bc, "x": p.x, "y": y}
        tensors |= {} if last is None or places is None else {"last": last, "places": places}
        g.launch(
            "mamba_scan/states.wgsl", workgroups, tensors, block.params, tiling,
            block.flops(2, p.head_dim), turns=block.turns(tiling),
        )  # fmt: skip


def backward(
    g: Graph, problem: MambaScan, dy: Tensor, dx: Tensor, dbc: Tensor, ddt: Tensor
) -> None:
    """Computes the gradients, recomputing the states; dbc and ddt are float32."""
    for block in blocks(g, problem):
        _backward(g, block, dy, dx, dbc, ddt)


def _backward(g: Graph, block: Block, dy: Tensor, dx: Tensor, dbc: Tensor, ddt: Tensor) -> None:
    p, params = block.problem, block.params
    tokens, pairs = block.prepare(g)
    rows = p.batch * block.heads * p.chunks * 2 * p.state_size
    states = g.float32("states", rows, p.head_dim)
    workgroups, tiling = block.of_states()
    passed = {"tokens": tokens, "bc": p.bc, "states": states}
    for name, own, flops in (
        ("states", {"x": p.x}, block.flops(1, 0)),
        ("reverse", {"pairs": pairs, "dy": dy, "dx": dx}, block.flops(2, p.head_dim)),
    ):
        g.launch(
            f"mamba_scan/{name}.wgsl", workgroups, {**passed, **own}, params, tiling, flops,
            turns=block.turns(tiling),
        )  # fmt: skip
    dpairs, near = block.matrix(g, "d pairs", p.chunk), block.matrix(g, "near", 2)
    g.launch(
        "mamba_scan/pair_gradients.wgsl",
        block.of_chunks(block.heads),
        {"tokens": tokens, "pairs": pairs, "x": p.x, "dy": dy, "dpairs": dpairs, "near": near},
        params,
        block.of_pairs(),
        block.flops(0, p.head_dim),
    )
    parts = ceil_div(p.state_size // 4, _GRADIENT_LANES)
    far = block.matrix(g, "far", 2 * parts)
    members = min(p.group, block.heads)
    lanes: dict[str, Constant] = {
        **block.constants,
        "LANES": _GRADIENT_LANES,
        "PARTS": parts,
        "THREADS": p.chunk // 4 * _GRADIENT_LANES,
        "ACCUMULATE": block.first % p.group > 0,
    }
    g.launch(
        "mamba_scan/group_gradients.wgsl",
        block.of_chunks(block.heads // members * parts),
        {**passed, "x": p.x, "dy": dy, "dpairs": dpairs, "dbc": dbc, "far": far},
        params,
        lanes,
        block.flops(2, 2 * p.state_size),
        turns=members * (p.head_dim // 2 + 2 * p.chunk + _GRADIENT_LANES),
    )
    g.launch(
        "mamba_scan/dt_gradients.wgsl",
        block.of_chunks(block.heads),
        {
            "tokens": tokens,
            "states": states,
            "near": near,
            "far": far,
            "a_log": p.a_log,
            "ddt": ddt,
        },
        params,
        {**block.constants, "PARTS": parts},
    )


def step(g: Graph, problem: MambaScan, state: Tensor, places: Tensor, y: Tensor) -> None:
    """Computes y of each sequence's new token, and updates its state.

    The state is (sequences · heads · state_size, head_dim) float32; ``places`` has each row's
    sequence.
    """
    p = problem
    tensors = {"bc": p.bc, "x": p.x, "dt": p.dt, "a_log": p.a_log, "d": p.d}
    g.launch(
        "mamba_scan/step.wgsl",
        (ceil_div(p.head_dim // 4, _LANES), p.heads, p.rows),
        {**tensors, "state": state, "places": places, "y": y},
        {**p.sizes, "heads": p.heads},
        {"LANES": _LANES, "PARTS": _STEP_PARTS, "THREADS": _LANES * _STEP_PARTS},
    )


def blocks(g: Graph, problem: MambaScan) -> Iterator[Block]:
    """All heads in blocks whose intermediates fit a binding."""
    p = problem
    states = 8 * p.batch * p.chunks * p.state_size * p.head_dim
    most = min(g.max_binding, _BLOCK_BYTES) // max(4 * p.rows * p.chunk, states)
    together = max(1, most // p.group) * p.group
    if most < p.group:
        together = max(n for n in range(1, p.group) if p.group % n == 0 and n <= max(most, 1))
    for first in range(0, p.heads, together):
        yield Block(p, first, min(together, p.heads - first))
