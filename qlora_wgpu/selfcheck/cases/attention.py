"""Attention, its rotation and its heads' norms."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.qk_layer_norm import qk_layer_norm
from qlora_wgpu.ops.qk_norm import qk_norm
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.reference import attention as attention_reference
from qlora_wgpu.reference import qk_layer_norm as qk_layer_norm_reference
from qlora_wgpu.reference import rms_norm as rms_norm_reference
from qlora_wgpu.reference import rope as rope_reference
from qlora_wgpu.selfcheck.cases.common import ONES, ROWS, normal
from qlora_wgpu.selfcheck.runner import Runner

_SAMPLES = np.array([[1] * 9 + [2] * 20 + [0] * 8])  # two in a row, and padding


def _attention(run: Runner, head_dim: int, window: int | None, softcap: float | None) -> None:
    q, do = normal("q", ROWS, 4 * head_dim), normal("do", ROWS, 4 * head_dim)
    k, v = normal("k", ROWS, 2 * head_dim), normal("v", ROWS, 2 * head_dim)
    scale = 1 / np.sqrt(head_dim)
    tq, tk, tv = (run.operand(a, grad=True) for a in (q, k, v))
    batch = run.batch(_SAMPLES)
    o = attention(run.graph, tq, tk, tv, batch, head_dim, scale, window, softcap)
    got_o, *gradients = run.run(o, *run.gradients(o, run.float32(do), tq, tk, tv))
    q, k, v, do = (run.rounded(a) for a in (q, k, v, do))
    exact = attention_reference.forward(q, k, v, _SAMPLES, head_dim, scale, window, softcap)
    run.compare(got_o, exact)
    expected = attention_reference.backward(
        do, q, k, v, _SAMPLES, head_dim, scale, got_o, window, softcap
    )
    for gradient, exact in zip(gradients, expected, strict=True):
        run.compare(gradient, exact)


def check_attention(run: Runner) -> None:
    """Grouped heads of several sizes, a window and a softcap."""
    _attention(run, 20, None, None)
    _attention(run, 22, None, None)
    _attention(run, 64, 7, None)
    _attention(run, 24, None, 3.0)


def check_rope(run: Runner) -> None:
    """Rotation and its inverse: whole heads, a part of them, and neighbours."""
    for head_dim, rotary_dim, interleaved in ((20, 20, False), (64, 32, False), (24, 12, True)):
        x, dy = normal("x", ROWS, 3 * head_dim), normal("dy", ROWS, 3 * head_dim)
        table = normal("table", ROWS, rotary_dim // 2, 2)
        tx = run.operand(x, grad=True)
        constant = run.graph.constant("table", table.astype(np.float32))
        batch = run.batch(ONES)
        y = rope(run.graph, tx, constant, batch, head_dim, rotary_dim, interleaved=interleaved)
        got_y, got_dx = run.run(y, *run.gradients(y, run.operand(dy), tx))
        shape = (np.arange(ROWS), table, head_dim, rotary_dim)
        x, dy = run.rounded(x), run.rounded(dy)
        run.compare(got_y, rope_reference.forward(x, *shape, interleaved=interleaved))
        run.compare(got_dx, rope_reference.backward(dy, *shape, interleaved=interleaved))


def check_qk_norm(run: Runner) -> None:
    """y and dx of each head."""
    heads, head_dim = 3, 20
    x, dy = normal("x", ROWS, heads * head_dim), normal("dy", ROWS, heads * head_dim)
    weight = normal("weight", head_dim)
    tx = run.operand(x, grad=True)
    y = qk_norm(run.graph, tx, run.float32(weight), 1e-5)
    got_y, got_dx = run.run(y, *run.gradients(y, run.float32(dy), tx))
    x, dy = (a.reshape(-1, head_dim) for a in (run.rounded(x), run.rounded(dy)))
    run.compare(got_y, rms_norm_reference.forward(x, weight, 1e-5).reshape(got_y.shape))
    run.compare(got_dx, rms_norm_reference.backward(dy, x, weight, 1e-5).reshape(got_dx.shape))


def check_qk_layer_norm(run: Runner) -> None:
    """y and dx of heads with weights of their own."""
    heads, head_dim = 3, 20
    x, dy = normal("x", ROWS, heads * head_dim), normal("dy", ROWS, heads * head_dim)
    weight = normal("weight", heads, head_dim)
    tx = run.operand(x, grad=True)
    y = qk_layer_norm(run.graph, tx, run.float32(weight), 1e-5)
    got_y, got_dx = run.run(y, *run.gradients(y, run.float32(dy), tx))
    x, dy = run.rounded(x), run.rounded(dy)
    run.compare(got_y, qk_layer_norm_reference.forward(x, weight, 1e-5))
    run.compare(got_dx, qk_layer_norm_reference.backward(dy, x, weight, 1e-5))
