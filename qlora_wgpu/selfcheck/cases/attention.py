"""Attention, RoPE and heads' norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import LARGEST_FLOAT16, Tensor
from qlora_wgpu.kernels.attention import SIZED_ROWS, Attention, delta_and_sizes
from qlora_wgpu.kernels.attention.matrix_units import keys_and_values, queries_and_gradients
from qlora_wgpu.model.batch_encoding import positions
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.reference import attention as attention_reference
from qlora_wgpu.selfcheck.cases.common import compare_op, each, no_ties, normal
from qlora_wgpu.selfcheck.runner import SUMS, Array, Runner, new_counts, rounded

# Rows of a batch: two samples and padding; padding in front; one sample and no padding.
_SAMPLES = np.array([[1] * 9 + [2] * 40 + [0] * 8, [0] * 5 + [1] * 52, [1] * 57])
_ROWS = _SAMPLES.size
# The same beyond one workgroup's 64 tokens, and a sample that starts with the second workgroup.
_LONG = np.array(
    [[1] * 9 + [2] * 80 + [0] * 12, [0] * 5 + [1] * 96, [1] * 101, [1] * 64 + [2] * 37]
)


@each(
    (20, None, None, True, False, False),
    (22, None, None, False, False, True),
    (24, 7, 3.0, True, False, False),
    (24, None, None, True, True, True),
    (64, 7, None, True, True, True),
    (64, 70, 3.0, False, False, False),
    # The most common settings and sizes: a run compiles the same shaders.
    (32, None, None, True, False, False),
    (64, None, None, True, False, False),
    (128, None, None, True, False, False),
    # No matrix unit has whole products of these, and 252 takes as many registers as 256.
    (20, 7, 3.0, False, True, False),
    (252, None, None, True, False, False),
)
def check_attention(
    run: Runner,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    short: bool,
    exact_gradient: bool,
    has_sinks: bool,
) -> None:
    """Grouped heads of several sizes, window, softcap and sinks, within a workgroup and beyond."""
    samples = _SAMPLES if short else _LONG
    if not short:  # as with many, which need no separate workgroups for heads that share keys
        run.graph.profile = replace(run.graph.profile, least_workgroups=0)
    heads = 6 if head_dim % 4 else 4  # with 22 elements, neither 6 nor 2 heads are whole units
    sinks = [2 * normal("sinks", heads)] * has_sinks
    sizes = heads, 2, head_dim
    compare_attention(run, sizes, samples, sinks, exact_gradient, window, softcap, size=2.0)


# Blocks that are a whole sample, several of one, within a workgroup's rows and beyond them.
_BLOCKED = {
    57: [[(0, 9), (12, 30), (30, 49)], [(5, 57)], [(1, 2), (20, 56)]],
    101: [[(2, 9), (9, 89)], [(40, 75), (80, 82)], [(0, 101)], [(3, 60), (64, 70), (70, 101)]],
}


@each(
    (20, None, None, True, False),
    (24, 7, 3.0, True, True),
    (24, 3, None, False, True),
    (64, None, None, False, False),
)
def check_attention_of_blocks(
    run: Runner,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    short: bool,
    exact_gradient: bool,
) -> None:
    """Tokens see all later ones of their block, and earlier ones within a window."""
    samples = _SAMPLES if short else _LONG
    if not short:
        run.graph.profile = replace(run.graph.profile, least_workgroups=0)
    blocks = np.zeros((*samples.shape, 2), np.int64)
    for row, some in zip(blocks, _BLOCKED[samples.shape[1]], strict=True):
        for begin, end in some:
            row[begin:end] = begin, end
    sizes = 4, 2, head_dim
    compare_attention(run, sizes, samples, [], exact_gradient, window, softcap, blocks=blocks)


def compare_attention(
    run: Runner,
    sizes: tuple[int, int, int],
    samples: np.ndarray,
    sinks: Sequence[Array],
    exact: bool,
    window: int | None = None,
    softcap: float | None = None,
    *,
    size: float = 1.0,
    near: float = 0.0,
    blocks: np.ndarray | None = None,
) -> None:
    """Compares attention with ``sizes``: heads, key heads and elements; ``size`` scales q.

    ``near`` is an additional tolerance of dq and dk, whose terms of order 1 may cancel.
    """
    heads, kv_heads, head_dim = sizes
    rows, scale, batch = samples.size, 1 / np.sqrt(head_dim), run.batch(samples, blocks=blocks)
    q, do = size * normal("q", rows, heads * head_dim), normal("do", rows, heads * head_dim)
    k, v = (normal(name, rows, kv_heads * head_dim) for name in "kv")

    def op(g: Graph, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        return attention(g, q, k, v, batch, head_dim, scale, window, softcap, *sinks)

    def formula(q: Array, k: Array, v: Array, *sinks: Array, **stored: Array) -> Any:
        options = dict(zip(("sinks",), sinks, strict=False))
        return attention_reference.attention(
            q, k, v, samples, head_dim, scale, window, softcap, **options, **stored,
            blocks=blocks,
        )  # fmt: skip

    allowed = [np.full(x.shape, near) for x in (q, k)] + [np.zeros(v.shape)] if near else []
    compare_op(
        run, op, formula, [q, k, v], *sinks, exact=exact, dy=do, stores=True, inner_dxs=allowed
    )


def _walked(
    run: Runner, qkv: Sequence[Array], do: Array, head_dim: int, exact: bool
) -> tuple[Attention, Tensor, Array]:
    """Attention of two samples whose output is q, with its gradient, and that as stored."""
    seq = len(do) // 2
    (q, k, v), batch = map(run.operand, qkv), run.batch(np.ones((2, seq), np.int64))
    lse = run.float32(normal("lse", q.rows * q.columns // head_dim))
    given = (run.float32 if exact else run.operand)(do)
    problem = Attention(q, k, v, q, lse, batch.segments, 2, head_dim, 1.0, seq, None)
    return problem, given, rounded(do, given.dtype)


@each((8, False), (24, True))
def check_attention_sizes(run: Runner, head_dim: int, exact_gradient: bool) -> None:
    """The magnitudes per block and head for matrix units; NaN and infinity are ignored."""
    seq, heads, kv_heads = 150, 4, 2
    rows = 2 * seq
    o, do = normal("o", rows, heads * head_dim), normal("do", rows, heads * head_dim)
    v, lse = normal("v", rows, kv_heads * head_dim), rounded(normal("lse", rows * heads), "float32")
    do *= 10.0 ** (np.arange(rows) % 19 - 9)[:, None]
    given = v.copy()
    given[70, 1], given[170, 2], given[299, 3] = np.nan, np.inf, -np.inf
    problem, cotangent, do = _walked(run, (o, given, given), do, head_dim, exact_gradient)
    (got,) = run.run(delta_and_sizes(run.graph, problem, cotangent))
    o, v = run.rounded(o), np.where(np.isfinite(given), np.abs(run.rounded(v)), 0.0)
    pairs = got[0, : 2 * rows * heads].reshape(-1, heads, 2)
    run.compare_exactly(pairs[..., 0].ravel(), lse)
    delta = (o * do).reshape(rows, heads, head_dim)
    run.compare(pairs[..., 1], delta.sum(axis=2), inner=SUMS * np.abs(delta).sum(axis=2))
    sizes = got[0, 2 * rows * heads :].reshape(2, heads, -1, 2)
    per_head = np.abs(do).reshape(2, seq, heads, head_dim).max(axis=3)
    of_values = v.reshape(2, seq, kv_heads, head_dim).max(axis=3).repeat(heads // kv_heads, axis=2)
    for block in range(-(-seq // SIZED_ROWS)):
        own = np.s_[:, SIZED_ROWS * block : SIZED_ROWS * (block + 1)]
        run.compare_exactly(sizes[:, :, block, 0], per_head[own].max(axis=1))
        run.compare_exactly(sizes[:, :, block, 1], of_values[own].max(axis=1))


@each((16, False), (24, True))
def check_attention_factors(run: Runner, head_dim: int, exact_gradient: bool) -> None:
    """f16 inputs of matrix units: gradients scaled by powers of two, others clamped, counted."""
    seq, heads, kv_heads = 70, 4, 2
    rows, sizes = 2 * seq, np.array([1.0, 2e-3, 30.0])[np.arange(2 * seq) % 3, None]
    q, do = (no_ties(name, rows, heads * head_dim) * sizes for name in ("q", "do"))
    k, v = (no_ties(name, rows, kv_heads * head_dim) for name in "kv")
    do[seq - 1 :: seq] *= 100.0  # beyond the first rows that share an entry
    do[seq:] *= 1e-12
    k[3, 1], k[69, 2], v[139, 3], q[5, 1] = 1e5, -3e6, 2e5, -4e7
    problem, cotangent, do = _walked(run, (q, k, v), do, head_dim, exact_gradient)
    g, counts = run.graph, new_counts()
    held = keys_and_values(g, problem, counts)
    of_each = delta_and_sizes(g, problem, cotangent)
    *got, count = run.run(*held, *queries_and_gradients(g, problem, cotangent, of_each), counts)
    grouped = do.reshape(2, seq, kv_heads, -1)
    largest = np.abs(grouped).max(axis=(1, 3), keepdims=True)
    grouped *= 2.0 ** (14 - np.floor(np.log2(largest)))
    given = *(run.rounded(a) for a in (k, v, q)), grouped.reshape(do.shape)
    for value, exact in zip(got, given, strict=True):
        run.compare(value, np.clip(exact, -LARGEST_FLOAT16, LARGEST_FLOAT16), "float16")
    run.compare_exactly(count[0], np.array(3.0))


@each(
    (64, 32, False), (20, 20, False), (24, 12, True), (24, 24, True), (64, 64, False),
    (22, 8, False),
)  # fmt: skip
def check_rope(run: Runner, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    """RoPE and its inverse: whole heads, partial and interleaved; one tensor, and two.

    Gradients of a single tensor, and of the second of two, are float32 sums, as with shared keys.
    """
    _compare_rope(run, _SAMPLES, head_dim, rotary_dim, (True, False, True), interleaved=interleaved)


@each((64, 32), (64, 64))
def check_rope_of_few_rows(run: Runner, head_dim: int, rotary_dim: int) -> None:
    """RoPE of few rows, as in decoding, of one tensor and of two."""
    samples = np.array([[1, 1, 1, 0], [1, 1, 2, 2]])
    _compare_rope(run, samples, head_dim, rotary_dim, None)


def _compare_rope(
    run: Runner,
    samples: np.ndarray,
    head_dim: int,
    rotary_dim: int,
    exact: tuple[bool, ...] | None,
    *,
    interleaved: bool = False,
) -> None:
    run.graph.profile = replace(run.graph.profile, fused_linears=True)
    xs = [normal(f"x{heads}", samples.size, heads * head_dim) for heads in (3, 5, 2)]
    table = normal("table", samples.shape[1], rotary_dim // 2, 2)
    constant = run.graph.constant("table", table.astype(np.float32))
    batch, sizes = run.batch(samples), (head_dim, rotary_dim)

    def op(g: Graph, *xs: Tensor) -> list[Tensor]:
        turned = (
            rope(g, some, constant, batch, *sizes, interleaved=interleaved)
            for some in (xs[:1], xs[1:])
        )
        return [y for ys in turned for y in ys]

    def formula(*xs: Array) -> tuple[Array, ...]:
        at = positions(samples).ravel()
        return tuple(attention_reference.rope(x, at, table, *sizes, interleaved) for x in xs)

    compare_op(run, op, formula, xs, exact=exact)
