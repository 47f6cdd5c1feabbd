"""The gated delta rule in chunks of tokens: the problem and its launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor, ceil_div

CHUNK = 64
_STATE = 512  # vectors of four of a head's state in workgroup memory
_LANES = 4  # maximum columns of these
_GRADIENT_LANES = 16  # invocations that share four tokens of a gradient
_STEP_PARTS = 16  # invocations that share a column of the state in a step
_BLOCK_BYTES = 128 << 20  # maximum bytes of an intermediate of heads that are launched together


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule over packed samples."""

    q: Tensor  # (batch · seq, key heads · key_dim)
    k: Tensor  # like q
    v: Tensor  # (batch · seq, value heads · value_dim)
    decay: Tensor  # (batch · seq, value heads) float32
    beta: Tensor  # like decay
    segments: Tensor  # uint32 (batch · seq): the tokens' samples
    batch: int  # sequences
    key_dim: int  # elements of a head of q and k, a multiple of 8
    value_dim: int  # elements of a head of v, a multiple of 8
    chunk: int = CHUNK  # tokens of a chunk: 16, 32 or 64

    def __post_init__(self) -> None:
        if self.key_dim > _STATE or self.chunk not in (16, 32, 64):
            raise GraphError(f"gated_delta_rule: {self.key_dim} rows, chunks of {self.chunk}")

    @property
    def rows(self) -> int:
        return self.q.rows

    @property
    def seq(self) -> int:
        return self.rows // self.batch

    @property
    def chunks(self) -> int:
        return ceil_div(self.seq, self.chunk)

    @property
    def group(self) -> int:
        return self.value_heads // (self.q.columns // self.key_dim)

    @property
    def value_heads(self) -> int:
        return self.v.columns // self.value_dim


@dataclass(frozen=True)
class _Block:
    """Neighbouring value heads that are launched together."""

    problem: GatedDelta
    first: int
    heads: int
    gradient: bool

    @property
    def pairs(self) -> int:
        """Number of stored matrices of a chunk's tokens by its tokens."""
        return 3 if self.gradient else 2

    @property
    def params(self) -> dict[str, int | float]:
        p = self.problem
        return {
            "seq": p.seq,
            "chunks": p.chunks,
            "heads": self.heads,
            "first_head": self.first,
            "group": p.group,
            "key_units": p.key_dim // 4,
            "value_units": p.value_dim // 4,
            "key_stride": p.q.units(4),
            "value_stride": p.v.units(4),
            "gate_stride": p.decay.stride,
        }

    @property
    def constants(self) -> dict[str, Constant]:
        return {"CHUNK": self.problem.chunk, "PAIRS": self.pairs}

    def of_chunks(self) -> tuple[int, int, int]:
        return self.problem.chunks, self.heads, self.problem.batch

    def of_pairs(self) -> dict[str, Constant]:
        """The tiling of kernels over pairs of four tokens of a chunk."""
        return {**self.constants, "THREADS": (self.problem.chunk // 4) ** 2}

    def of_states(self) -> tuple[tuple[int, int, int], dict[str, Constant]]:
        """Workgroups and tiling of kernels that iterate over chunks."""
        p = self.problem
        lanes = min(_LANES, 1 << (_STATE // p.key_dim).bit_length() - 1)
        tiling: dict[str, Constant] = {
            **self.constants,
            "LANES": lanes,
            "STATE": p.key_dim * lanes,
            "THREADS": 2 * p.chunk // 4 * lanes,
        }
        return (ceil_div(p.value_dim // 4, lanes), self.heads, p.batch), tiling

    def turns(self, tiling: dict[str, Constant]) -> int:
        """Maximum loop iterations of an invocation that iterates over chunks."""
        p, threads = self.problem, int(tiling["THREADS"])
        fours = ceil_div(p.key_dim // 4 * int(tiling["LANES"]), threads)  # of the state
        return p.chunks * (p.key_dim // 4 + p.chunk + fours * (5 + p.chunk // 2))

    def flops(self, state: int, keys: int, values: int) -> int:
        """Operations of products with the state, and of token pairs' keys and values."""
        p = self.problem
        near = p.chunk * (keys * p.key_dim + values * p.value_dim) // 2
        return 2 * p.rows * self.heads * (state * p.key_dim * p.value_dim + near)

    def matrix(self, g: Graph, name: str, *shape: int) -> Tensor:
        """A float32 intermediate, (rows, heads · …)."""
        columns = self.heads
        for size in shape:
            columns *= size
        return g.float32(name, self.problem.rows, columns)

    def prepare(self, g: Graph) -> tuple[Tensor, Tensor]:
        """Launches the parts that depend only on tokens of the same chunk."""
        p = self.problem
        tokens = self.matrix(g, "tokens", 8)
        pairs = self.matrix(g, "pairs", self.pairs, p.chunk)
        inputs = {"q": p.q, "k": p.k, "decay": p.decay, "beta": p.beta, "segments": p.segments}
        g.launch(
            "gated_delta/prepare.wgsl",
            self.of_chunks(),
            {**inputs, "tokens": tokens, "pairs": pairs},
            self.params,
            {**self.of_pairs(), "GRADIENT": self.gradient},
            self.flops(0, 2, 0),
        )
        return tokens, pairs


def forward(
    g: Graph,
    problem: GatedDelta,
    o: Tensor,
    last: Tensor | None = None,
    places: Tensor | None = None,
) -> None:
    """Computes o, like v, and the state after the last token.

    If given, ``last`` is (sequences · value heads · key_dim, value_dim) float32; the part of the
    sequence in ``places`` is overwritten.
    """
    p = problem
    for block in _blocks(g, p, gradient=False):
        tokens, pairs = block.prepare(g)
        workgroups, tiling = block.of_states()
        tensors = {"tokens": tokens, "pairs": pairs, "q": p.q, "k": p.k, "v": p.v, "o": o}
        tensors |= {} if last is None or places is None else {"last": last, "places": places}
        flops = block.flops(3, 0, 2)
        g.launch(
            "gated_delta/states.wgsl", workgroups, tensors, block.params, tiling, flops,
            turns=block.turns(tiling),
        )  # fmt: skip


@dataclass(frozen=True)
class Gradients:
    """The backward's inputs and outputs."""

    dout: Tensor  # like v
    dq: Tensor  # like q
    dk: Tensor  # like k
    dv: Tensor  # like v
    ddecay: Tensor  # like decay, float32
    dbeta: Tensor  # like beta, float32


def backward(g: Graph, problem: GatedDelta, gradients: Gradients) -> None:
    """Computes the gradients, recomputing the forward's intermediates."""
    for block in _blocks(g, problem, gradient=True):
        _backward(g, block, gradients)


def _backward(g: Graph, block: _Block, gradients: Gradients) -> None:
    p, params = block.problem, block.params
    tokens, pairs = block.prepare(g)
    made = block.matrix(g, "values", 2, p.value_dim)
    rows = p.batch * block.heads * p.chunks * 2 * p.key_dim
    states = g.float32("states", rows, p.value_dim)
    dpairs = block.matrix(g, "d pairs", 2, p.chunk)
    partial = block.matrix(g, "partial", 8)
    dkeys = block.matrix(g, "d keys", 2, p.key_dim)
    workgroups, tiling = block.of_states()
    passed = {"tokens": tokens, "pairs": pairs, "made": made, "states": states, "k": p.k}
    g.launch(
        "gated_delta/states.wgsl",
        workgroups,
        {**passed, "v": p.v},
        params,
        tiling,
        block.flops(2, 0, 1),
        turns=block.turns(tiling),
    )
    dout = gradients.dout
    g.launch(
        "gated_delta/reverse.wgsl",
        workgroups,
        {**passed, "q": p.q, "dout": dout, "dv": gradients.dv},
        params,
        tiling,
        block.flops(3, 0, 2),
        turns=block.turns(tiling),
    )
    g.launch(
        "gated_delta/pair_gradients.wgsl",
        block.of_chunks(),
        {
            "tokens": tokens,
            "pairs": pairs,
            "v": p.v,
            "dout": dout,
            "made": made,
            "dpairs": dpairs,
            "partial": partial,
        },
        params,
        block.of_pairs(),
        block.flops(0, 0, 2),
    )
    lanes: dict[str, Constant] = {
        **block.constants,
        "LANES": _GRADIENT_LANES,
        "THREADS": p.chunk // 4 * _GRADIENT_LANES,
    }
    shared = {"tokens": tokens, "q": p.q, "k": p.k, "states": states, "dpairs": dpairs}
    shared |= {"dkeys": dkeys, "partial": partial}
    for name, own, flops in (
        ("query", {"dout": dout}, block.flops(1, 1, 0)),
        ("key", {"made": made}, block.flops(2, 3, 0)),
    ):
        path = f"gated_delta/{name}_gradient.wgsl"
        g.launch(path, block.of_chunks(), {**shared, **own}, params, lanes, flops)
    gates = {"ddecay": gradients.ddecay, "dbeta": gradients.dbeta}
    g.launch(
        "gated_delta/gate_gradients.wgsl",
        block.of_chunks(),
        {"tokens": tokens, "states": states, "partial": partial, **gates},
        params,
        block.constants,
    )
    fields = ("heads", "first_head", "group", "key_units", "key_stride")
    g.launch(
        "gated_delta/normalize_backward.wgsl",
        2 * p.rows * block.heads // p.group,
        {
            "tokens": tokens,
            "q": p.q,
            "k": p.k,
            "dkeys": dkeys,
            "dq": gradients.dq,
            "dk": gradients.dk,
        },
        {name: params[name] for name in fields},
    )


def step(g: Graph, problem: GatedDelta, state: Tensor, places: Tensor, o: Tensor) -> None:
    """Computes o of each sequence's new token, and updates its state.

    The state is (sequences · value heads · key_dim, value_dim) float32; ``places`` has each row's
    sequence.
    """
    p = problem
    tensors = {"q": p.q, "k": p.k, "v": p.v, "decay": p.decay, "beta": p.beta}
    units = p.value_dim // 4
    g.launch(
        "gated_delta/step.wgsl",
        (ceil_div(units, _LANES), p.value_heads, p.rows),
        {**tensors, "state": state, "places": places, "o": o},
        {
            "group": p.group,
            "key_units": p.key_dim // 4,
            "value_units": units,
            "heads": p.value_heads,
        },
        {"LANES": _LANES, "PARTS": _STEP_PARTS, "THREADS": _LANES * _STEP_PARTS},
    )


def _blocks(g: Graph, problem: GatedDelta, *, gradient: bool) -> Iterator[_Block]:
    """All value heads in blocks whose intermediates fit a binding."""
    p = problem
    whole = _Block(p, 0, p.value_heads, gradient)
    most = 4 * p.rows * whole.pairs * p.chunk
    if gradient:
        states = 8 * p.batch * p.chunks * p.key_dim * p.value_dim
        most = max(most, states, 8 * p.rows * max(p.key_dim, p.value_dim))
    together = max(1, min(g.max_binding, _BLOCK_BYTES) // (most * p.group)) * p.group
    for first in range(0, p.value_heads, together):
        yield replace(whole, first=first, heads=min(together, p.value_heads - first))
