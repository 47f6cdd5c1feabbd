"""Attention, its rotation and its heads' norms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qlora_wgpu.graph.tensor import LARGEST_FLOAT16
from qlora_wgpu.kernels.attention import SIZED_ROWS, Attention, delta_and_sizes
from qlora_wgpu.kernels.attention.matrix_units import keys_and_values, queries_and_gradients
from qlora_wgpu.model.batch_encoding import positions
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.pointwise import qk_layer_norm, qk_norm
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.reference import attention as attention_reference
from qlora_wgpu.reference import norms as norms_reference
from qlora_wgpu.reference.tape import grad, grads
from qlora_wgpu.selfcheck.cases.common import each, no_ties, normal, of_halves, uneven
from qlora_wgpu.selfcheck.runner import SUMS, Runner, new_counts

# Rows of a batch: two samples and padding; padding in front; one sample and no padding.
_SAMPLES = np.array([[1] * 9 + [2] * 40 + [0] * 8, [0] * 5 + [1] * 52, [1] * 57])
_ROWS = _SAMPLES.size
# The same beyond one workgroup's 64 tokens, and a sample that begins with the second one's.
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
    (128, None, None, True, False, False),
    # No matrix unit has whole products of these, and 252 take as many registers as 256.
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
    """Grouped heads of several sizes, a window, a softcap, sinks, in a workgroup and beyond."""
    samples = _SAMPLES if short else _LONG
    if not short:  # as if there were many, which need no workgroups for each head that shares keys
        run.graph.profile = replace(run.graph.profile, least_workgroups=0)
    rows = samples.size
    heads = 6 if head_dim % 4 else 4  # of 22 elements, neither 6 nor 2 are whole units of eight
    q, do = 2 * normal("q", rows, heads * head_dim), normal("do", rows, heads * head_dim)
    k, v = normal("k", rows, 2 * head_dim), normal("v", rows, 2 * head_dim)
    scale = 1 / np.sqrt(head_dim)
    tq, tk, tv = (run.operand(a, grad=True) for a in (q, k, v))
    batch = run.batch(samples)
    sinks = 2 * normal("sinks", heads).astype(np.float32).astype(np.float64) if has_sinks else None
    given = None if sinks is None else run.float32(sinks)
    o = attention(run.graph, tq, tk, tv, batch, head_dim, scale, window, softcap, given)
    cotangent = run.float32(do) if exact_gradient else run.operand(do)
    gradients = run.gradients(o, cotangent, tq, tk, tv)
    inner = of_halves(run)
    got_o, *got = run.run(o, *gradients)
    do = do if exact_gradient else run.rounded(do)
    q, k, v = (run.rounded(a) for a in (q, k, v))
    options = window, softcap, sinks
    exact = attention_reference.attention(q, k, v, samples, head_dim, scale, *options)
    run.compare(got_o, exact, o.dtype, inner=inner)
    expected = grads(
        attention_reference.attention, do, q, k, v, samples, head_dim, scale, *options, got_o, of=3
    )
    for value, exact, gradient in zip(got, expected, gradients, strict=True):
        run.compare(value, exact, gradient.dtype, inner=inner)


@each((8, False), (24, True))
def check_attention_sizes(run: Runner, head_dim: int, exact_gradient: bool) -> None:
    """What matrix units are told of each block and head; NaN and infinity have no size."""
    seq, heads, kv_heads = 150, 4, 2
    rows = 2 * seq
    o, do = normal("o", rows, heads * head_dim), normal("do", rows, heads * head_dim)
    v, lse = normal("v", rows, kv_heads * head_dim), normal("lse", rows * heads)
    do *= 10.0 ** (np.arange(rows) % 19 - 9)[:, None]
    given = v.copy()
    given[70, 1], given[170, 2], given[299, 3] = np.nan, np.inf, -np.inf
    to, tv = run.operand(o), run.operand(given)
    batch = run.batch(np.ones((2, seq), np.int64))
    problem = Attention(
        to, tv, tv, to, run.float32(lse), batch.segments, 2, head_dim, 1.0, seq, None
    )
    cotangent = run.float32(do) if exact_gradient else run.operand(do)
    (got,) = run.run(delta_and_sizes(run.graph, problem, cotangent))
    do = do.astype(np.float32).astype(np.float64) if exact_gradient else run.rounded(do)
    o, v = run.rounded(o), np.where(np.isfinite(given), np.abs(run.rounded(v)), 0.0)
    pairs = got[0, : 2 * rows * heads].reshape(-1, heads, 2)
    run.compare_exactly(pairs[..., 0].ravel(), lse.astype(np.float32).astype(np.float64))
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
    """What matrix units walk over as f16: a gradient by powers of two, the rest held, counted."""
    seq, heads, kv_heads = 70, 4, 2
    rows, sizes = 2 * seq, np.array([1.0, 2e-3, 30.0])[np.arange(2 * seq) % 3, None]
    q, do = (no_ties(name, rows, heads * head_dim) * sizes for name in ("q", "do"))
    k, v = (no_ties(name, rows, kv_heads * head_dim) for name in "kv")
    do[seq - 1 :: seq] *= 100.0  # beyond the first rows whose sizes are told together
    do[seq:] *= 1e-12
    k[3, 1], k[69, 2], v[139, 3], q[5, 1] = 1e5, -3e6, 2e5, -4e7
    tq, tk, tv = map(run.operand, (q, k, v))
    batch = run.batch(np.ones((2, seq), np.int64))
    lse = run.float32(normal("lse", rows * heads))
    problem = Attention(tq, tk, tv, tq, lse, batch.segments, 2, head_dim, 1.0, seq, None)
    cotangent = run.float32(do) if exact_gradient else run.operand(do)
    counts = new_counts()
    made = (
        *keys_and_values(run.graph, problem, counts),
        *queries_and_gradients(
            run.graph, problem, cotangent, delta_and_sizes(run.graph, problem, cotangent)
        ),
    )
    *got, count = run.run(*made, counts)
    do = do.astype(np.float32).astype(np.float64) if exact_gradient else run.rounded(do)
    grouped = do.reshape(2, seq, kv_heads, -1)
    largest = np.abs(grouped).max(axis=(1, 3), keepdims=True)
    grouped *= 2.0 ** (14 - np.floor(np.log2(largest)))
    given = *(run.rounded(a) for a in (k, v, q)), grouped.reshape(do.shape)
    for value, exact in zip(got, given, strict=True):
        run.compare(value, np.clip(exact, -LARGEST_FLOAT16, LARGEST_FLOAT16), "float16")
    run.compare_exactly(count[0], np.array(3.0))


@each(
    (20, 20, False), (64, 32, False), (24, 12, True), (24, 24, True), (64, 64, False),
    (22, 8, False),
)  # fmt: skip
def check_rope(run: Runner, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    """Rotation and its inverse: whole heads, a part of them, and neighbours; alone and of two.

    Gradients of what is alone, and of the second of two, are exact: sums, as of shared keys.
    """
    g = run.graph
    g.profile = replace(g.profile, fused_linears=True)
    xs = [normal(f"x{heads}", _ROWS, heads * head_dim) for heads in (3, 5, 2)]
    dys = [normal(f"dy{heads}", _ROWS, heads * head_dim) for heads in (3, 5, 2)]
    table = normal("table", _SAMPLES.shape[1], rotary_dim // 2, 2)
    txs = [run.operand(x, grad=True) for x in xs]
    constant, batch = g.constant("table", table.astype(np.float32)), run.batch(_SAMPLES)
    ys = [
        y
        for some in (txs[:1], txs[1:])
        for y in rope(g, some, constant, batch, head_dim, rotary_dim, interleaved=interleaved)
    ]
    for y, dy, make in zip(ys, dys, (run.float32, run.operand, run.float32), strict=True):
        g.add_gradient(y, make(dy))
    g.backward()
    dys[1] = run.rounded(dys[1])
    dxs = [g.gradient_of(tx) for tx in txs]
    got = run.run(*ys, *dxs)
    shape = (positions(_SAMPLES).ravel(), table, head_dim, rotary_dim)
    for x, y, value in zip(xs, ys, got[:3], strict=True):
        exact = attention_reference.rope(run.rounded(x), *shape, interleaved=interleaved)
        run.compare(value, exact, y.dtype)
    for x, dy, dx, value in zip(xs, dys, dxs, got[3:], strict=True):
        exact = grad(attention_reference.rope, dy, x, *shape, interleaved=interleaved)
        run.compare(value, exact, dx.dtype)


@each((64, 32), (64, 64))
def check_rope_of_few_rows(run: Runner, head_dim: int, rotary_dim: int) -> None:
    """Rotation of as few rows as new tokens are, of one tensor and of two."""
    samples = np.array([[1, 1, 1, 0], [1, 1, 2, 2]])
    g, batch = run.graph, run.batch(samples)
    g.profile = replace(g.profile, fused_linears=True)
    xs = [normal(f"few{heads}", samples.size, heads * head_dim) for heads in (3, 5, 2)]
    table = normal("table", samples.shape[1], rotary_dim // 2, 2)
    txs = [run.operand(x) for x in xs]
    constant = g.constant("table", table.astype(np.float32))
    ys = [
        y
        for some in (txs[:1], txs[1:])
        for y in rope(g, some, constant, batch, head_dim, rotary_dim)
    ]
    shape = (positions(samples).ravel(), table, head_dim, rotary_dim)
    for x, y, value in zip(xs, ys, run.run(*ys), strict=True):
        exact = attention_reference.rope(run.rounded(x), *shape, interleaved=False)
        run.compare(value, exact, y.dtype)


@each((4, 24, True), (3, 22, True), (4, 24, False), (3, 22, False))
def check_qk_norm(run: Runner, heads: int, head_dim: int, exact_gradient: bool) -> None:
    """y and dx of each head."""
    x, dy = uneven("x", _ROWS, heads * head_dim), normal("dy", _ROWS, heads * head_dim)
    weight = normal("weight", head_dim)
    tx = run.operand(x, grad=True)
    y = qk_norm(run.graph, tx, run.float32(weight), 1e-5)
    (dx,) = run.gradients(y, run.float32(dy) if exact_gradient else run.operand(dy), tx)
    got_y, got_dx = run.run(y, dx)
    dy = dy if exact_gradient else run.rounded(dy)
    x, dy = (a.reshape(-1, head_dim) for a in (run.rounded(x), dy))
    exact = norms_reference.rms_norm(x, weight, 1e-5)
    run.compare(got_y, exact.reshape(got_y.shape), y.dtype, by_row=True)
    exact = grad(norms_reference.rms_norm, dy, x, weight, 1e-5)
    run.compare(got_dx, exact.reshape(got_dx.shape), dx.dtype, by_row=True)


@each(
    (4, 24, True), (3, 22, True), (4, 24, False), (3, 22, False), (4, 24, True, 1),
    (3, 22, False, 1), (3, 22, True, 3),
)  # fmt: skip
def check_qk_layer_norm(
    run: Runner, heads: int, head_dim: int, exact_gradient: bool, biases: int = 0
) -> None:
    """y and dx of heads with weights of their own, or with one weight and one bias."""
    x, dy = uneven("x", _ROWS, heads * head_dim), normal("dy", _ROWS, heads * head_dim)
    x += 0.5 * np.abs(x).max(axis=1, keepdims=True)  # a mean to be taken away
    weight = normal("weight", biases or heads, head_dim)
    bias = normal("bias", biases, head_dim) if biases else None
    tx = run.operand(x, grad=True)
    added = None if bias is None else run.float32(bias)
    y = qk_layer_norm(run.graph, tx, run.float32(weight), 1e-5, added)
    (dx,) = run.gradients(y, run.float32(dy) if exact_gradient else run.operand(dy), tx)
    got_y, got_dx = run.run(y, dx)
    x, dy = run.rounded(x), dy if exact_gradient else run.rounded(dy)
    run.compare(got_y, norms_reference.qk_layer_norm(x, weight, 1e-5, bias), y.dtype, by_row=True)
    exact = grad(norms_reference.qk_layer_norm, dy, x, weight, 1e-5)
    run.compare(got_dx, exact, dx.dtype, by_row=True)
