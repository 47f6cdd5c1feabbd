"""Attention on matrix units: products in f16 with float32 sums, or in float32 if units support it.

A workgroup processes some queries, or keys, of one head, and loads the others through workgroup
memory. Two subgroups share each strip of its rows: the products of an iteration and the results'
columns. Elements of a subgroup matrix are only accessible through workgroup memory, so the forward
rescales its sums, which stay in registers, only if a weight would become too large for f16.
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
from qlora_wgpu.kernels.attention.workgroup import PerHead, Tiling, is_per_head

SIZED_ROWS = 64  # rows per entry of the table of gradients' and values' magnitudes
_ROWS = 32  # of a workgroup
_THREADS = 64


def keys_and_values(
    g: Graph, problem: Attention, saturated: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """k and v as f16; values beyond its range are clamped, and counted in ``saturated``."""
    tensors = {} if saturated is None else {"saturated": saturated}
    return _factors(g, problem, ("k", problem.k), ("v", problem.v), tensors)


def queries_and_gradients(
    g: Graph, problem: Attention, dout: Tensor, lse_delta: Tensor
) -> tuple[Tensor, Tensor]:
    """q as f16, and dout scaled by a power of two per sequence and group of heads.

    ``lse_delta`` includes the magnitudes of ``delta_and_sizes``.
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


_STRIP = 16  # minimum rows of a strip
_OTHERS = (32, 16)  # rows of the other side per iteration
# Units of a matrix that an invocation loads at a time: registers are scarce, above all in dkdv.
_LOADS = {"forward": (2, 4), "dq": (3, 4), "dkdv": (2, 4)}
_SHORT_HEAD = 96  # for longer heads, two small workgroups of dkdv are faster for lack of registers
_REGISTERS = 64  # maximum registers per invocation for results
_MEMORY = 32 << 10  # preferred maximum of workgroup memory, in bytes
_DEPTHS = (8, 16)  # depths of products whose weights can overwrite their scores
_VECTORS = {"f16": 8, "f32": 4}  # elements of 16 bytes


@dataclass(frozen=True)
class MatrixTiling:
    """A kernel's tiling for matrix units."""

    shape: MatrixShape  # a subgroup's product
    head_dim: int  # elements of a head
    strips: int  # strips of a workgroup's rows
    others: int  # rows of the other side per iteration
    name: str  # the kernel's

    @property
    def fragments(self) -> int:
        """Products along the rows of a strip."""
        return max(_STRIP // self.shape.m, 1)

    @property
    def block(self) -> int:
        return self.strips * self.fragments * self.shape.m

    @property
    def threads(self) -> int:
        return 2 * self.strips * self.shape.threads

    @property
    def is_backward(self) -> bool:
        """Whether the weights need two products."""
        return self.name != "forward"

    @property
    def mixes(self) -> int:
        return 2 if self.name == "dkdv" else 1

    @property
    def infos(self) -> int:
        """Numbers stored for each row of the other side."""
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
        """Parts of the columns in which own rows pass through workgroup memory."""
        return 2 if self.head_dim // self.shape.k % 2 == 0 else 1

    @property
    def spans(self) -> int:
        """Workgroups that share the results' columns."""
        sums = self.mixes * self.fragments * self.shape.m * self.head_dim // 2
        return ceil_div(sums, self.shape.threads * _REGISTERS)

    @property
    def loads(self) -> int:
        """Units of eight per invocation, matrix of the other side and iteration."""
        return ceil_div(self.others * self.head_dim // 8, self.threads)

    def fits(self, limits: Limits) -> bool:
        shape, across = self.shape, max(self.shape.n, self.shape.k)
        whole = self.head_dim % across == 0 and self.others % across == 0
        if not self.is_backward:  # two subgroups share the scores' columns
            whole = whole and self.others % (2 * shape.n) == 0
        return (
            whole
            and (shape.element == "f32" or shape.k in _DEPTHS)
            and self.infos * self.others // 4 <= self.threads
            and Limits(self.threads, 16 * self.memory).within(limits)
        )

    def constants(self) -> dict[str, Constant]:
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


def matrix_tiling(profile: Profile, head_dim: int, name: str) -> MatrixTiling | None:
    """A kernel's tiling within a GPU's limits; None if there is none."""
    if not profile.matrix:
        return None
    m, n, k, threads = profile.matrix
    shape = MatrixShape(m, n, k, threads, profile.matrix_element)
    small = Limits(profile.limits.invocations, min(profile.limits.workgroup_bytes, _MEMORY))
    most_strips = profile.attention_strips
    if name == "dkdv" and head_dim > _SHORT_HEAD:
        most_strips = max(most_strips // 2, 1)
    strips = range(most_strips, 0, -1)
    tilings = [
        MatrixTiling(shape, head_dim, count, others, name) for others in _OTHERS for count in strips
    ]
    for limits in (small, profile.limits):
        for most in _LOADS[name]:
            for tiling in tilings:
                if tiling.loads <= most and tiling.fits(limits):
                    return tiling
    return None


class MatrixTiles(PerHead):
    """On matrix units; f16 is used for bfloat16 operands, float32 stays exact."""

    suffix = "_matrix"

    def fits(self, problem: Attention, profile: Profile) -> bool:
        """Whether the profile asks for it, heads are whole products, and limits are met."""
        if profile.attention_kind != "matrix":
            return False
        factors = (problem.q, problem.k, problem.v)
        halves = all(factor.dtype == "bfloat16" for factor in factors)
        takes = profile.matrix_element == "f32" or halves
        names = ("forward",) if problem.gradients is None else ("dq", "dkdv")
        return takes and all(matrix_tiling(profile, problem.head_dim, name) for name in names)

    def launch(self, g: Graph, problem: Attention) -> None:
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
            # Own rows of dout have their own scale.
            own = {**tensors, "dout": gradients.dout, "dq": gradients.dq}
            self._launch(g, problem, "dq", problem.heads, own)
        if gradients.dk is not None and gradients.dv is not None:
            self._keys(g, problem, {**tensors, "dout": dout}, gradients.dk, gradients.dv)

    def _unit(self, problem: Attention) -> int:
        return 8

    def _tiling(self, profile: Profile, problem: Attention, name: str) -> Tiling:
        tiling = matrix_tiling(profile, problem.head_dim, name)
        assert tiling is not None  # it fits
        constants = tiling.constants()
        if name == "dkdv":
            constants["PER_HEAD"] = is_per_head(profile, problem)
        return Tiling(tiling.block, constants, tiling.spans)


def delta_and_sizes(g: Graph, problem: Attention, dout: Tensor) -> Tensor:
    """(lse, delta) of each row and head, then the maximum |dout| and |v| of each block and head.

    A block is ``SIZED_ROWS`` rows of a sequence; NaN and infinity are ignored.
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
