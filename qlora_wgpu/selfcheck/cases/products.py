"""Linear layers with their adapters, and the weights that they decode."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.graph.dtype import padded
from qlora_wgpu.graph.tensor import row_blocks
from qlora_wgpu.model.weights import nf4_matrix
from qlora_wgpu.ops import dora
from qlora_wgpu.ops.linear import linear
from qlora_wgpu.ops.modules import DenseMatrix, Linear
from qlora_wgpu.quant import quantize_nf4
from qlora_wgpu.reference import dora as dora_reference
from qlora_wgpu.reference import linear as linear_reference
from qlora_wgpu.selfcheck.cases.common import KEY, ONES, ROWS, filled_adapter, normal
from qlora_wgpu.selfcheck.runner import Runner

_NAME = "model.layers.0.x"


def check_dequantization(run: Runner) -> None:
    """NF4 codes, singly and doubly quantized, whole words and not."""
    for shape in ((37, 20), (21, 96), (5, 7)):
        for double in (True, False):
            quantized = quantize_nf4(normal("w", *shape).astype(np.float32), 64, double)
            weight = nf4_matrix("w", quantized, textures=run.graph.profile.textures)
            shards = [shard for _, shard in weight.shards(run.graph)]
            exact = run.rounded(quantized.dequantize().astype(np.float64))
            run.compare(np.concatenate(run.run(*shards)), exact)


def check_linear(run: Runner) -> None:
    """y, dx, dA and dB of a layer with LoRA and dropout, a bias and a residual, in two shards."""
    inner, outer, r = 72, 130, 5
    x, dy, w = normal("x", ROWS, inner), normal("dy", ROWS, outer), normal("w", outer, inner)
    bias, skip = normal("bias", outer), normal("skip", ROWS, outer)
    config = LoraConfig(r=r, lora_alpha=r, lora_dropout=0.3)
    adapter, parts = filled_adapter(config, [LinearSpec(_NAME, outer, inner)])
    lora = adapter.loras[_NAME]
    pieces = tuple((i, run.operand(w[i : i + 72])) for i in range(0, outer, 72))
    layer = Linear("x", DenseMatrix(outer, inner, pieces), run.float32(bias), lora)
    tx, tskip = run.operand(x, grad=True), run.float32(skip, grad=True)
    y = linear(run.graph, tx, layer, run.batch(ONES, dropout_key=KEY), tskip)
    dx, dskip = run.gradients(y, run.float32(dy), tx, tskip)
    got_y, got_dx, got_skip, da, db = run.run(y, dx, dskip, lora.grad_a, lora.grad_b)
    a, b = parts.values()
    stride = padded(inner)
    mask = linear_reference.dropout_mask(ROWS, stride, inner, 0.3, KEY, lora.key)
    x, w = run.rounded(x), run.rounded(w)
    run.compare(got_y, linear_reference.forward(x, w, bias, a, b, 1.0, mask) + skip)
    run.compare(got_skip, dy)
    expected = linear_reference.backward(run.rounded(dy), x, w, a, b, 1.0, mask)
    for gradient, exact in zip((got_dx, da, db), expected, strict=True):
        run.compare(gradient, exact)


def check_long_product(run: Runner) -> None:
    """A reduction that GPUs cut into parts, and an input whose gradients are added up."""
    rows, inner, outer = 3, 20, 2500
    x, w = normal("x", rows, inner), normal("w", outer, inner)
    dys = normal("dy", rows, outer), normal("dz", rows, outer)
    layer = Linear("x", DenseMatrix(outer, inner, ((0, run.operand(w)),)), None, None)
    tx, batch = run.operand(x, grad=True), run.batch(ONES[:, :rows])
    for dy in dys:
        y = linear(run.graph, tx, layer, batch)
        run.graph.add_gradient(y, run.float32(dy))
    run.graph.backward()
    (got,) = run.run(run.graph.gradient_of(tx))
    run.compare(got, sum(run.rounded(dy) for dy in dys) @ run.rounded(w))


def check_dora(run: Runner) -> None:
    """y, dx and the gradients of A, B and the magnitudes."""
    inner, outer = 44, 83
    x, dy, w = normal("x", ROWS, inner), normal("dy", ROWS, outer), normal("w", outer, inner)
    bias, skip = normal("bias", outer), normal("skip", ROWS, outer)
    config = LoraConfig(r=3, lora_alpha=6, use_dora=True)
    adapter, parts = filled_adapter(config, [LinearSpec(_NAME, outer, inner)])
    lora, grad = adapter.loras[_NAME], adapter.loras[_NAME].grad_magnitude
    assert grad is not None
    matrix = DenseMatrix(outer, inner, ((0, run.operand(w)),))
    tx = run.operand(x, grad=True)
    layer = Linear("x", matrix, run.float32(bias), lora)
    y = linear(run.graph, tx, layer, run.batch(ONES), run.float32(skip))
    (dx,) = run.gradients(y, run.float32(dy), tx)
    got_y, got_dx, da, db, dm = run.run(y, dx, lora.grad_a, lora.grad_b, grad)
    a, b, m = parts.values()
    x, w, dy = run.rounded(x), run.rounded(w), np.asarray(dy, np.float32).astype(np.float64)
    norms, mask = dora_reference.norm(w, a, b, 2.0), np.ones_like(x)
    z = run.rounded(linear_reference.forward(x, w, np.zeros(outer), a, b, 2.0, mask))
    run.compare(got_y, dora_reference.forward(z, m, norms) + bias + skip)
    dz, exact_dm = dora_reference.backward(dy, z, m, norms)
    expected = linear_reference.backward(run.rounded(dz), x, w, a, b, 2.0, mask)
    for gradient, exact in zip((got_dx, da, db, dm[0]), (*expected, exact_dm), strict=True):
        run.compare(gradient, exact)


def check_dora_norms(run: Runner) -> None:
    """Norms of a shard of rows."""
    w = normal("w", 300, 44)
    config = LoraConfig(r=3, lora_alpha=6, use_dora=True)
    adapter, parts = filled_adapter(config, [LinearSpec(_NAME, 300, 44)])
    out = run.graph.float_vector("norms", 300)
    for first, block in row_blocks(run.operand(w), 256):
        dora.norm(run.graph, block, adapter.loras[_NAME], out, first, 2.0, plain=True)
    a, b, _ = parts.values()
    (got,) = run.run(out)
    run.compare(got[0], dora_reference.norm(run.rounded(w), a, b, 2.0))
