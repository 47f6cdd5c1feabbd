"""Attention on matrix units: products in f16 with float32 sums, or in float32 where units are.

A workgroup takes some queries, or keys, of one head, and passes the others through its memory. Each
strip of its rows is two subgroups', which share the products of a turn and the results' columns.
Elements of such a matrix are out of reach but through workgroup memory, so the forward has two
rounds over the keys: one for the log-sum-exps, one for the sums, which never leave the registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.matrix import Limits, MatrixShape
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, ceil_div, matrix
from qlora_wgpu.kernels.attention.problem import Attention, Gradients
from qlora_wgpu.kernels.attention.workgroup import Cut, PerHead, is_per_head

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

    ``lse_delta`` is with the sizes, as ``delta_and_sizes`` gives it.
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


_STRIP = 16  # rows of a strip, at least
_OTHERS = (32, 16)  # rows of the other side in a turn
# Units of a matrix that an invocation has under way: registers are to last, dkdv's most of all.
_LOADS = {"forward": (2, 4), "dq": (3, 4), "dkdv": (2, 4)}
_SHORT_HEAD = 96  # longer ones leave so few registers that two small workgroups of dkdv are better
_REGISTERS = 64  # of an invocation that hold results, at most
_MEMORY = 32 << 10  # bytes of workgroup memory, if it can be
_DEPTHS = (8, 16)  # of products whose weights can lie where their scores were
_VECTORS = {"f16": 8, "f32": 4}  # elements of 16 bytes


@dataclass(frozen=True)
class MatrixCut:
    """How a kernel's work is cut for matrix units."""

    shape: MatrixShape  # what a subgroup multiplies at once
    head_dim: int  # elements of a head
    strips: int  # strips of a workgroup's rows
    others: int  # rows of the other side in a turn
    name: str  # the kernel's

    @property
    def fragments(self) -> int:
        """Products along the rows of a strip."""
        return max(_STRIP // self.shape.m, 1)

    @property
    def block(self) -> int:
        """Rows of a workgroup."""
        return self.strips * self.fragments * self.shape.m

    @property
    def threads(self) -> int:
        """Invocations of a workgroup."""
        return 2 * self.strips * self.shape.threads

    @property
    def is_backward(self) -> bool:
        """Whether two products make the weights."""
        return self.name != "forward"

    @property
    def mixes(self) -> int:
        """Results."""
        return 2 if self.name == "dkdv" else 1

    @property
    def infos(self) -> int:
        """Numbers that are kept of each of the others' rows."""
        return 2 if self.name == "dkdv" else 0

    @property
    def memory(self) -> int:
        """Units of 16 bytes of workgroup memory."""
        vectors = self.head_dim // _VECTORS[self.shape.element]
        stride = vectors + 1
        sides = 2 if self.is_backward else 1
        scores = self.block * (self.others // 4 + 1)
        turn = 2 * self.others * stride + sides * scores + 2 * self.infos * self.others // 4
        results = self.block * (self.shape.n // 2 + 1)
        own = sides * self.block * (vectors // self.own_parts + 1)
        return max(turn, own, results, self.threads)

    @property
    def own_parts(self) -> int:
        """Parts of their columns in which own rows pass through the memory."""
        return 2 if self.head_dim // self.shape.k % 2 == 0 else 1

    @property
    def spans(self) -> int:
        """Workgroups that share the results' columns."""
        sums = self.mixes * self.fragments * self.shape.m * self.head_dim // 2
        return ceil_div(sums, self.shape.threads * _REGISTERS)

    @property
    def loads(self) -> int:
        """Units of eight that an invocation loads of each of the others' matrices in a turn."""
        return ceil_div(self.others * self.head_dim // 8, self.threads)

    def fits(self, limits: Limits) -> bool:
        """Whether a GPU allows it, and its parts are whole."""
        shape, across = self.shape, max(self.shape.n, self.shape.k)
        whole = self.head_dim % across == 0 and self.others % across == 0
        if not self.is_backward:  # two subgroups share the columns of scores
            whole = whole and self.others % (2 * shape.n) == 0
        return (
            whole
            and (shape.element == "f32" or shape.k in _DEPTHS)
            and self.infos * self.others // 4 <= self.threads
            and Limits(self.threads, 16 * self.memory).within(limits)
        )

    def constants(self) -> dict[str, Constant]:
        """The shader's constants."""
        shape = self.shape
        return {
            "HALF": shape.element == "f16",
            "BACKWARD": self.is_backward,
            "MATRIX_M": shape.m,
            "MATRIX_N": shape.n,
            "MATRIX_K": shape.k,
            "SUBGROUP_SIZE": shape.threads,
            "THREADS": self.threads,
            "HEAD": self.head_dim,
            "HEAD_BITS": (self.head_dim - 1).bit_length(),
            "FRAGMENTS": self.fragments,
            "OWN_PARTS": self.own_parts,
            "PART_STEPS": self.head_dim // shape.k // self.own_parts,
            "OTHERS": self.others,
            "OWN_SIDES": 2 if self.is_backward else 1,
            "SCORE_COLUMNS": self.others // shape.n // (1 if self.is_backward else 2),
            "MIXES": self.mixes,
            "MIXED_TILE": 0 if self.is_backward else 1,
            "COLUMNS": ceil_div(self.head_dim // shape.n, 2 * self.spans),
            "SPANS": self.spans,
            "LOADS": self.loads,
            "OCTETS": ceil_div(self.block * self.others // 8, self.threads),
            "INFORMED": self.infos > 0,
            "INFOS": self.infos,
            "LOOKS": ceil_div(self.others, self.threads),
            "MEMORY": self.memory,
            "SIZED": SIZED_ROWS,
        }


def matrix_cut(profile: Profile, head_dim: int, name: str) -> MatrixCut | None:
    """The cut for a kernel within a GPU's limits; None if there is none."""
    if not profile.matrix:
        return None
    m, n, k, threads = profile.matrix
    shape = MatrixShape(m, n, k, threads, profile.matrix_element)
    small = Limits(profile.limits.invocations, min(profile.limits.workgroup_bytes, _MEMORY))
    most_strips = profile.attention_strips
    if name == "dkdv" and head_dim > _SHORT_HEAD:
        most_strips = max(most_strips // 2, 1)
    strips = range(most_strips, 0, -1)
    cuts = [
        MatrixCut(shape, head_dim, count, others, name) for others in _OTHERS for count in strips
    ]
    for limits in (small, profile.limits):
        for most in _LOADS[name]:
            for cut in cuts:
                if cut.loads <= most and cut.fits(limits):
                    return cut
    return None


class MatrixTiles(PerHead):
    """On matrix units; f16 is for operands of bfloat16, float32 stays exact."""

    suffix = "_matrix"

    def fits(self, problem: Attention, profile: Profile) -> bool:
        """Where the profile asks for it, heads are whole products, and all is within limits."""
        if profile.attention_kind != "matrix":
            return False
        factors = (problem.q, problem.k, problem.v)
        halves = all(factor.dtype == "bfloat16" for factor in factors)
        takes = profile.matrix_element == "f32" or halves
        names = ("forward",) if problem.gradients is None else ("dq", "dkdv")
        return takes and all(matrix_cut(profile, problem.head_dim, name) for name in names)

    def launch(self, g: Graph, problem: Attention) -> None:
        """Adds the launches; the forward counts what is beyond f16."""
        if problem.gradients is not None:
            super().launch(g, problem)
            return
        tensors = {"o": problem.o, "lse": problem.lse, "sinks": problem.sinks}
        if g.profile.matrix_element == "f16":
            tensors["k"], tensors["v"] = keys_and_values(g, problem, g.saturated)
            tensors["saturated"] = g.saturated
        self._launch(g, problem, "forward", problem.heads, tensors)

    def _backward(self, g: Graph, problem: Attention, gradients: Gradients) -> None:
        if g.profile.matrix_element == "f32":
            super()._backward(g, problem, gradients)
            return
        lse_delta = delta_and_sizes(g, problem, gradients.dout)
        k, v = keys_and_values(g, problem)
        q, dout = queries_and_gradients(g, problem, gradients.dout, lse_delta)
        tensors = {"lse_delta": lse_delta, "q": q, "k": k, "v": v}
        if gradients.dq is not None:
            # Own rows of dout are brought to a size of their own.
            own = {**tensors, "dout": gradients.dout, "dq": gradients.dq}
            self._launch(g, problem, "dq", problem.heads, own)
        if gradients.dk is not None and gradients.dv is not None:
            self._keys(g, problem, {**tensors, "dout": dout}, gradients.dk, gradients.dv)

    def _unit(self, problem: Attention) -> int:
        return 8

    def _cut(self, profile: Profile, problem: Attention, name: str) -> Cut:
        cut = matrix_cut(profile, problem.head_dim, name)
        assert cut is not None  # it fits
        constants = cut.constants()
        if name == "dkdv":
            constants["PER_HEAD"] = is_per_head(profile, problem)
        return Cut(cut.block, constants, cut.spans)


def delta_and_sizes(g: Graph, problem: Attention, dout: Tensor) -> Tensor:
    """(lse, delta) of each row and head, then the largest |dout| and |v| of each block and head.

    A block is ``SIZED_ROWS`` rows of a sequence; what is not finite has no size.
    """
    rows, heads = problem.q.rows, problem.heads
    blocks = ceil_div(problem.seq, SIZED_ROWS)
    pairs = rows * heads + problem.batch * heads * blocks
    lse_delta = g.float_vector("lse, delta and sizes", 2 * pairs)
    g.launch(
        "attention/delta_sizes.wgsl",
        (blocks, heads, problem.batch),
        {"o": problem.o, "dout": dout, "lse": problem.lse, "lse_delta": lse_delta, "v": problem.v},
        {"rows": rows, "seq": problem.seq, "heads": heads, "group": problem.group},
        {"SIZED": SIZED_ROWS, "UNITS": problem.head_dim // 8},
    )
    return lse_delta
