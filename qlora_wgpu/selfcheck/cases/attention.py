"""Attention, its rotation and its heads' norms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qlora_wgpu.model.batch_encoding import positions
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.qk_layer_norm import qk_layer_norm
from qlora_wgpu.ops.qk_norm import qk_norm
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.reference import attention as attention_reference
from qlora_wgpu.reference import qk_layer_norm as qk_layer_norm_reference
from qlora_wgpu.reference import rms_norm as rms_norm_reference
from qlora_wgpu.reference import rope as rope_reference
from qlora_wgpu.selfcheck.cases.common import each, normal, uneven
from qlora_wgpu.selfcheck.runner import Runner

# Rows of a batch: two samples and padding; padding in front; one sample and no padding.
_SAMPLES = np.array([[1] * 9 + [2] * 40 + [0] * 8, [0] * 5 + [1] * 52, [1] * 57])
_ROWS = _SAMPLES.size
# The same beyond one workgroup's 64 tokens, and a sample that begins with the second one's.
_LONG = np.array(
    [[1] * 9 + [2] * 80 + [0] * 12, [0] * 5 + [1] * 96, [1] * 101, [1] * 64 + [2] * 37]
)


@each(
    (20, None, None, True, False),
    (22, None, None, False, False),
    (24, 7, 3.0, True, False),
    (24, None, None, True, True),
    (64, 7, None, True, False),
    (64, 70, 3.0, False, False),
    (128, None, None, True, False),
)
def check_attention(
    run: Runner,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    short: bool,
    exact_gradient: bool,
) -> None:
    """Grouped heads of several sizes, a window and a softcap, within a workgroup and beyond."""
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
    o = attention(run.graph, tq, tk, tv, batch, head_dim, scale, window, softcap)
    cotangent = run.float32(do) if exact_gradient else run.operand(do)
    gradients = run.gradients(o, cotangent, tq, tk, tv)
    got_o, *got = run.run(o, *gradients)
    do = do if exact_gradient else run.rounded(do)
    q, k, v = (run.rounded(a) for a in (q, k, v))
    exact = attention_reference.forward(q, k, v, samples, head_dim, scale, window, softcap)
    run.compare(got_o, exact, o.dtype)
    expected = attention_reference.backward(
        do, q, k, v, samples, head_dim, scale, got_o, window, softcap
    )
    for value, exact, gradient in zip(got, expected, gradients, strict=True):
        run.compare(value, exact, gradient.dtype)


@each(
    (20, 20, False), (64, 32, False), (24, 12, True), (24, 24, True), (64, 64, False),
    (22, 8, False),
)  # fmt: skip
def check_rope(run: Runner, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    """Rotation and its inverse: whole heads, a part of them, and neighbours; alone and of two."""
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
    for y, dy in zip(ys, dys, strict=True):
        g.add_gradient(y, run.operand(dy))
    g.backward()
    dxs = [g.gradient_of(tx) for tx in txs]
    got = run.run(*ys, *dxs)
    shape = (positions(_SAMPLES).ravel(), table, head_dim, rotary_dim)
    for x, y, value in zip(xs, ys, got[:3], strict=True):
        exact = rope_reference.forward(run.rounded(x), *shape, interleaved=interleaved)
        run.compare(value, exact, y.dtype)
    for dy, dx, value in zip(dys, dxs, got[3:], strict=True):
        exact = rope_reference.backward(run.rounded(dy), *shape, interleaved=interleaved)
        run.compare(value, exact, dx.dtype)


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
    exact = rms_norm_reference.forward(x, weight, 1e-5)
    run.compare(got_y, exact.reshape(got_y.shape), y.dtype, by_row=True)
    exact = rms_norm_reference.backward(dy, x, weight, 1e-5)
    run.compare(got_dx, exact.reshape(got_dx.shape), dx.dtype, by_row=True)


@each((4, 24, True), (3, 22, True), (4, 24, False), (3, 22, False))
def check_qk_layer_norm(run: Runner, heads: int, head_dim: int, exact_gradient: bool) -> None:
    """y and dx of heads with weights of their own."""
    x, dy = uneven("x", _ROWS, heads * head_dim), normal("dy", _ROWS, heads * head_dim)
    x += 0.5 * np.abs(x).max(axis=1, keepdims=True)  # a mean to be taken away
    weight = normal("weight", heads, head_dim)
    tx = run.operand(x, grad=True)
    y = qk_layer_norm(run.graph, tx, run.float32(weight), 1e-5)
    (dx,) = run.gradients(y, run.float32(dy) if exact_gradient else run.operand(dy), tx)
    got_y, got_dx = run.run(y, dx)
    x, dy = run.rounded(x), dy if exact_gradient else run.rounded(dy)
    run.compare(got_y, qk_layer_norm_reference.forward(x, weight, 1e-5), y.dtype, by_row=True)
    exact = qk_layer_norm_reference.backward(dy, x, weight, 1e-5)
    run.compare(got_dx, exact, dx.dtype, by_row=True)
