"""One check per kind of kernel: forward and gradients at odd shapes, against NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.model.weights import nf4_matrix
from qlora_wgpu.ops.adamw import AdamWConfig, AdamWState, adamw
from qlora_wgpu.ops.attention import attention as attend
from qlora_wgpu.ops.cross_entropy import cross_entropy as lose
from qlora_wgpu.ops.embedding import embedding as embed
from qlora_wgpu.ops.glu import glu as gate_up
from qlora_wgpu.ops.linear import linear as apply_linear
from qlora_wgpu.ops.modules import DenseMatrix, Head, Linear
from qlora_wgpu.ops.rms_norm import rms_norm as normalize
from qlora_wgpu.ops.rope import rope as rotate
from qlora_wgpu.quant import quantize_nf4
from qlora_wgpu.reference import adamw as adamw_reference
from qlora_wgpu.reference import attention as attention_reference
from qlora_wgpu.reference import cross_entropy as cross_entropy_reference
from qlora_wgpu.reference import glu as glu_reference
from qlora_wgpu.reference import linear as linear_reference
from qlora_wgpu.reference import rms_norm as rms_norm_reference
from qlora_wgpu.reference import rope as rope_reference
from qlora_wgpu.selfcheck.runner import Array, Runner

_ROWS, _KEY = 37, 12345
_ONES = np.ones((1, _ROWS), np.int64)


def _normal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def dequantization(run: Runner) -> None:
    """NF4 codes with doubly quantized scales, whole words and not."""
    for shape in ((37, 20), (21, 96)):
        found = quantize_nf4(_normal(*shape).astype(np.float32), 64, True)
        weight = nf4_matrix("w", found, textures=run.graph.profile.textures)
        shards = [shard for _, shard in weight.shards(run.graph)]
        run.compare(
            np.concatenate(run.run(*shards)), run.rounded(found.dequantize().astype(np.float64))
        )


def linear(run: Runner) -> None:
    """y, dx, dA and dB of a layer with LoRA and dropout."""
    inner, outer, r = 72, 130, 5
    x, dy, w = _normal(_ROWS, inner), _normal(_ROWS, outer), _normal(outer, inner)
    spec = LinearSpec("model.layers.0.x", outer, inner)
    adapter = Adapter(LoraConfig(r=r, lora_alpha=r, lora_dropout=0.3), [spec])
    parts = {n: _normal(*a.shape) for n, a in adapter.split(adapter.initial(0)).items()}
    values = adapter.join({n: a.astype(np.float32) for n, a in parts.items()})
    for flat, data in ((adapter.parameters, values), (adapter.gradient, np.zeros_like(values))):
        assert flat.storage is not None
        flat.storage.data = data
    lora = adapter.loras[spec.name]
    layer = Linear("x", DenseMatrix(outer, inner, ((0, run.operand(w)),)), None, lora)
    tx = run.operand(x, grad=True)
    y = apply_linear(run.graph, tx, layer, run.batch(_ONES, dropout_key=_KEY))
    (dx,) = run.gradients(y, run.float32(dy), tx)
    got_y, got_dx, da, db = run.run(y, dx, lora.grad_a, lora.grad_b)
    a, b = (np.asarray(p, np.float32).astype(np.float64) for p in parts.values())
    stride = -(-inner // 8) * 8
    mask = linear_reference.dropout_mask(_ROWS, stride, inner, 0.3, _KEY, lora.key)
    x, w, dy = run.rounded(x), run.rounded(w), run.rounded(dy)
    run.compare(got_y, linear_reference.forward(x, w, np.zeros(outer), a, b, 1.0, mask))
    expected = linear_reference.backward(dy, x, w, a, b, 1.0, mask)
    for got, wanted in zip((got_dx, da, db), expected, strict=True):
        run.compare(got, wanted)


def attention(run: Runner) -> None:
    """Two samples in a row and padding; grouped heads, a window."""
    mask = np.array([[1] * 9 + [2] * 20 + [0] * 8])
    for head_dim, window in ((20, None), (64, 7)):
        q, do = _normal(_ROWS, 4 * head_dim), _normal(_ROWS, 4 * head_dim)[::-1].copy()
        k, v = _normal(_ROWS, 2 * head_dim), _normal(_ROWS, 2 * head_dim)[::-1].copy()
        scale = 1 / np.sqrt(head_dim)
        tq, tk, tv = (run.operand(a, grad=True) for a in (q, k, v))
        o = attend(run.graph, tq, tk, tv, run.batch(mask), head_dim, scale, window)
        gradients = run.gradients(o, run.float32(do), tq, tk, tv)
        got = run.run(o, *gradients)
        q, k, v, do = (run.rounded(a) for a in (q, k, v, do))
        given = (mask, head_dim, scale)
        run.compare(got[0], attention_reference.forward(q, k, v, *given, window=window))
        expected = attention_reference.backward(do, q, k, v, *given, window=window, o=got[0])
        for actual, wanted in zip(got[1:], expected, strict=True):
            run.compare(actual, wanted)


def rms_norm(run: Runner) -> None:
    """y and dx."""
    x, dy, weight = _normal(_ROWS, 130), _normal(_ROWS, 130)[::-1].copy(), _normal(130)
    tx = run.float32(x, grad=True)
    y = normalize(run.graph, tx, run.float32(weight), 1e-5)
    got = run.run(y, *run.gradients(y, run.float32(dy), tx))
    run.compare(got[0], rms_norm_reference.forward(x, weight, 1e-5))
    run.compare(got[1], rms_norm_reference.backward(dy, x, weight, 1e-5))


def rope(run: Runner) -> None:
    """Rotation and its inverse."""
    for head_dim in (20, 64):
        x = _normal(_ROWS, 3 * head_dim)
        table = _normal(_ROWS, head_dim // 2, 2)
        tx = run.operand(x, grad=True)
        constant = run.graph.constant("table", table.astype(np.float32))
        y = rotate(run.graph, tx, constant, run.batch(_ONES), head_dim, head_dim)
        got = run.run(y, *run.gradients(y, run.operand(x), tx))
        exact = (np.arange(_ROWS), table, head_dim, head_dim)
        x = run.rounded(x)
        run.compare(got[0], rope_reference.forward(x, *exact))
        run.compare(got[1], rope_reference.backward(x, *exact))


def glu(run: Runner) -> None:
    """SwiGLU and GeGLU with their gradients."""
    for activation in ("silu", "gelu_pytorch_tanh"):
        gate, up, dy = 3 * _normal(_ROWS, 52), _normal(_ROWS, 53)[:, 1:], _normal(_ROWS, 54)[:, 2:]
        tensors = [run.operand(a, grad=True) for a in (gate, up)]
        y = gate_up(run.graph, tensors[0], tensors[1], activation)
        got = run.run(y, *run.gradients(y, run.float32(dy), *tensors))
        gate, up = run.rounded(gate), run.rounded(up)
        run.compare(got[0], glu_reference.forward(gate, up, activation))
        expected = glu_reference.backward(dy, gate, up, activation)
        for actual, wanted in zip(got[1:], expected, strict=True):
            run.compare(actual, wanted)


def cross_entropy(run: Runner) -> None:
    """Summed loss through lm_head, and the gradient of the hidden states."""
    vocab, columns = 331, 20
    hidden, head = _normal(_ROWS, columns), _normal(vocab, columns)
    targets = np.random.default_rng(1).integers(0, vocab, (1, _ROWS))
    targets[0, ::3] = -100
    th, stats = run.operand(hidden, grad=True), run.float32(np.zeros((1, 4)))
    matrix = DenseMatrix(vocab, columns, ((0, run.operand(head)),))
    lose(run.graph, th, Head(matrix), run.batch(_ONES, targets=targets), stats, gradient=True)
    got_stats, got = run.run(stats, run.graph.gradient_of(th))
    hidden, head = run.rounded(hidden), run.rounded(head)
    loss = cross_entropy_reference.forward(hidden, head, targets[0])
    run.compare(got_stats[0, :1], np.array([loss]))
    run.compare(got, cross_entropy_reference.backward(hidden, head, targets[0]))


def embedding(run: Runner) -> None:
    """Looked-up rows."""
    weight, ids = _normal(83, 20), np.random.default_rng(2).integers(0, 83, (1, _ROWS))
    matrix = DenseMatrix(83, 20, ((0, run.operand(weight)),))
    (got,) = run.run(embed(run.graph, matrix, run.batch(_ONES, ids)))
    run.compare(got, run.rounded(weight)[ids[0]])


def optimizer(run: Runner) -> None:
    """Norm, clipping and two steps of AdamW."""
    length, config = 1216, AdamWConfig(weight_decay=0.1)
    state = adamw_reference.State(_normal(length), np.zeros(length), np.zeros(length))

    def flat(values: Array) -> Tensor:
        data = np.asarray(values, np.float32)
        return vector("flat", data.size, "float32", Storage("flat", "check", data.nbytes, data))

    p, m, v = state.p.copy(), state.m.copy(), state.v.copy()
    for t in (1, 2):
        gradient = 3 * _normal(length + t)[t:]
        info = np.array([1e-2, 1 - 0.9**t, np.sqrt(1 - 0.999**t), 1e-2])
        tensors = [flat(a) for a in (p, gradient, m, v, info, np.array([9.0, 17.0, 7.0, 7.0]))]
        tp, tg, tm, tv, step, stats = tensors
        adamw(run.graph, AdamWState(tp, tg, tm, tv, step, stats), config)
        p, m, v = (a[0] for a in run.run(tp, tm, tv))
        run.graph.launches.clear()
        adamw_reference.step(
            state, gradient, 17, t, lr=1e-2, beta1=0.9, beta2=0.999, epsilon=1e-8,
            weight_decay=0.1, max_norm=1.0,
        )  # fmt: skip
    for got, wanted in ((p, state.p), (m, state.m), (v, state.v)):
        run.compare(got, wanted)


CHECKS: dict[str, Callable[[Runner], None]] = {
    "dequantization": dequantization,
    "linear": linear,
    "attention": attention,
    "rms_norm": rms_norm,
    "rope": rope,
    "glu": glu,
    "cross_entropy": cross_entropy,
    "embedding": embedding,
    "optimizer": optimizer,
}
