"""DoRA: the scaling of a layer's outputs, with dropout and without, and the norms of weights."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.graph.tensor import padded, row_blocks
from qlora_wgpu.kernels.common import DropoutMask
from qlora_wgpu.ops import dora
from qlora_wgpu.ops.linear import linear
from qlora_wgpu.ops.modules import DenseMatrix, Linear
from qlora_wgpu.ops.pointwise import dropout_parts
from qlora_wgpu.reference import linear as linear_reference
from qlora_wgpu.reference.tape import grad, grads
from qlora_wgpu.selfcheck.cases.common import (
    KEY,
    ROWS,
    each,
    filled_adapter,
    joined,
    normal,
    whole_gradient,
)
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner

_NAMES = ("model.layers.0.q_proj", "model.layers.0.up_proj")


@each((True, "residual"), (False, "operand"), (True, "operand"), (False, "residual"),
      (False, "float32"), (True, "float32"), (True, "residual", 0.3),
      (False, "operand", 0.3))  # fmt: skip
def check_dora(run: Runner, has_bias: bool, output: str, dropout: float = 0.0) -> None:
    """Two layers of one input: y, the sum of dx, and the gradients of A, B and the magnitudes.

    The input is small, so that roundings of the sums are, too, and hide no summand.
    """
    rows, inner, outer, g = ROWS, 530, 83, run.graph
    specs = [LinearSpec(name, outer, inner) for name in _NAMES]
    lora = LoraConfig(r=3, lora_alpha=6, use_dora=True, lora_dropout=dropout)
    adapter, parts = filled_adapter(lora, specs)
    x, skip = 0.05 * normal("x", rows, inner), normal("skip", rows, outer)
    bias, tx = normal("bias", outer) * has_bias, run.operand(x, grad=True)
    tbias = run.float32(bias) if has_bias else None
    residual = run.float32(skip) if output == "residual" else None
    batch = run.batch(np.ones((1, rows), np.int64), dropout_key=KEY if dropout else None)
    ys = []
    for name in _NAMES:
        w = normal(f"w of {name}", outer, inner)
        pieces = tuple((i, run.weight(w[i : i + 48])) for i in range(0, outer, 48))
        layer = Linear(name, DenseMatrix(outer, inner, pieces), tbias, adapter.loras[name])
        ys.append(linear(g, tx, layer, batch, residual, float32=output == "float32"))
    dys = [normal(f"dy of {name}", rows, outer) for name in _NAMES]
    g.add_gradient(ys[1], run.operand(dys[1]))
    (dx,) = run.gradients(ys[0], run.float32(dys[0]), tx)
    *got, got_x, got_flat = run.run(*ys, dx, whole_gradient(adapter))
    x, total = run.rounded(x), np.zeros_like(x)
    gradients: dict[str, Array] = {}
    for name, y, value, dy in zip(_NAMES, ys, got, (dys[0], run.rounded(dys[1])), strict=True):
        names = [n for n in parts if name in n]
        a, b, m = (parts[n] for n in names)
        w, mask = run.rounded_weight(normal(f"w of {name}", outer, inner)), np.ones_like(x)
        if dropout:
            key = adapter.loras[name].key
            mask = linear_reference.dropout_mask(rows, padded(inner), inner, dropout, KEY, key)
        kept, rest = (run.rounded(part) for part in linear_reference.dropout_parts(x, mask))
        norms, ones = linear_reference.dora_norm(w, a, b, 2.0), np.ones_like(x)
        z = linear_reference.linear(kept, w, a, b, 2.0, ones)
        scaled = linear_reference.dora(z, m, norms)
        exact = scaled + rest @ w.T + bias + (skip if residual else 0.0)
        # What is scaled is an operand.
        run.compare(value, exact, y.dtype, inner=ROUNDING[run.dtype] * np.abs(scaled))
        dz, dm = grads(linear_reference.dora, dy, z, m, norms, of=2)
        d_kept, da, db = grads(
            linear_reference.linear, run.rounded(dz), kept, w, a, b, 2.0, ones, of=(0, 2, 3)
        )
        total += grad(linear_reference.dropout_parts, (d_kept, run.rounded(dy) @ w), x, mask)
        gradients |= dict(zip(names, (da, db, dm), strict=True))
    rounding = ROUNDING[run.dtype] / 2  # of sums
    run.compare(got_x, total, inner=rounding)
    run.compare(got_flat, joined(adapter, gradients), inner=rounding)


@each((True,), (False,))
def check_dora_norms(run: Runner, plain: bool) -> None:
    """Norms of shards of rows, or one by them; of a row of zeros that is zero."""
    rows, inner, name = 300, 530, _NAMES[0]
    w = normal("w", rows, inner)
    adapter, parts = filled_adapter(
        LoraConfig(r=3, lora_alpha=6, use_dora=True), [LinearSpec(name, rows, inner)]
    )
    out = run.graph.float_vector("norms", rows)
    for first, block in row_blocks(run.weight(w), 256):
        dora.norm(run.graph, block, adapter.loras[name], out, first, 2.0, plain=plain)
    a, b, _ = parts.values()
    (got,) = run.run(out)
    exact = linear_reference.dora_norm(run.rounded_weight(w), a, b, 2.0)
    run.compare(got[0], exact if plain else 1 / exact)


@each((True,), (False,))
def check_dropout_parts(run: Runner, in_operands: bool) -> None:
    """An input in two, and the gradients of both in one."""
    shape, g = (ROWS, 75), run.graph
    given = run.operand if in_operands else run.float32
    rounded = run.rounded if in_operands else np.asarray
    x, tx = run.rounded(normal("x", *shape)), run.operand(normal("x", *shape), grad=True)
    batch = run.batch(np.ones((1, ROWS), np.int64), dropout_key=KEY)
    kept, rest = dropout_parts(g, tx, DropoutMask(0.3, 7), batch)
    dkept, drest = normal("dkept", *shape), normal("drest", *shape)
    g.add_gradient(kept, given(dkept))
    (dx,) = run.gradients(rest, given(drest), tx)
    mask = linear_reference.dropout_mask(ROWS, padded(75), 75, 0.3, KEY, 7)
    exact = grad(linear_reference.dropout_parts, (rounded(dkept), rounded(drest)), x, mask)
    for got, expected in zip(
        run.run(kept, rest, dx), (*linear_reference.dropout_parts(x, mask), exact), strict=True
    ):
        run.compare(got, expected, run.dtype)
