"""Norms of rows and of heads."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.graph.offload import CheckpointPolicy
from qlora_wgpu.ops.norms import layer_norm, rms_norm
from qlora_wgpu.ops.pointwise import (
    gated_rms_norm,
    qk_layer_norm,
    qk_norm,
)
from qlora_wgpu.ops.tensor import as_operand
from qlora_wgpu.reference import norms as formulas
from qlora_wgpu.reference.tape import grad, grads
from qlora_wgpu.selfcheck.cases.common import (
    ROWS,
    compare_op,
    each,
    normal,
    of_types,
    uneven,
)
from qlora_wgpu.selfcheck.runner import Runner

_HELD = 250  # no more than any subgroup holds of a row, where its invocations hold one
_WIDE = 2100  # more than any subgroup holds, and than a row's threads take at once
_ROWS = 171


@each((True, _HELD), (False, _HELD), (True, _WIDE), (False, _WIDE))
def check_rms_norm(run: Runner, rounded_first: bool, columns: int) -> None:
    """y, and dx of two uses, each with a gradient of its own type; one adds to a residual.

    dx as an operand comes from the launch that adds to it.
    """
    x, weight = uneven("x", ROWS, columns), normal("weight", columns)
    skip, dy, dz = (normal(name, ROWS, columns) for name in ("skip", "dy", "dz"))
    tskip = (run.operand if rounded_first else run.float32)(skip, grad=True)
    tx = run.float32(x, grad=True)
    run.graph.recomputation = CheckpointPolicy(remakes=True)
    y = rms_norm(run.graph, tx, run.float32(weight), 1e-5)
    z = rms_norm(run.graph, tx, run.float32(weight), 1e-5, residual=tskip)
    again = run.graph.rematerialize(y)
    first, second = of_types(run, rounded_first)
    run.graph.add_gradient(z, first(dz))
    dx, dskip = run.gradients(y, second(dy), tx, tskip)
    got_y, got_z, got_again, got_dx, got_rounded, got_skip = run.run(
        y, z, again, dx, as_operand(run.graph, dx), dskip
    )
    run.compare_exactly(got_rounded, run.rounded(got_dx))
    run.compare_exactly(got_again, got_y)
    dy, dz = (dy, run.rounded(dz)) if rounded_first else (run.rounded(dy), dz)
    x = np.asarray(x, np.float32).astype(np.float64)
    exact = formulas.rms_norm(x, weight, 1e-5)
    run.compare(got_y, exact, y.dtype, by_row=True)
    skip = run.rounded(skip) if rounded_first else skip
    run.compare(got_z, exact + skip, z.dtype, by_row=True)
    run.compare(got_skip, dz, dskip.dtype)
    run.compare(got_dx, grad(formulas.rms_norm, dy + dz, x, weight, 1e-5), by_row=True)


def check_only_norm(run: Runner) -> None:
    """RMSNorm of an operand that goes nowhere else: dx is made in its type."""
    x, weight, dy = uneven("x", ROWS, 52), normal("weight", 52), normal("dy", ROWS, 52)
    tx = run.operand(x, grad=True)
    run.graph.recomputation = CheckpointPolicy(remakes=True)
    y = rms_norm(run.graph, tx, run.float32(weight), 1e-5)
    again = run.graph.rematerialize(y)
    (dx,) = run.gradients(y, run.float32(dy), tx)
    got, got_y, got_again = run.run(dx, y, again)
    run.compare_exactly(got_again, got_y)
    exact = grad(formulas.rms_norm, dy, run.rounded(x), weight, 1e-5)
    run.compare(got, exact, dx.dtype, by_row=True)


@each((True, True), (False, True), (True, False), (False, False))
def check_layer_norm(run: Runner, has_bias: bool, rounded_first: bool) -> None:
    """y and dx of two uses, each with a gradient of its own type; dx as an operand, too."""
    x, weight, bias = uneven("x", ROWS, _WIDE), normal("weight", _WIDE), normal("bias", _WIDE)
    dy, dz = normal("dy", ROWS, _WIDE), normal("dz", ROWS, _WIDE)
    x += 0.5 * np.abs(x).max(axis=1, keepdims=True)  # a mean to be taken away
    tx = run.float32(x, grad=True)
    tbias = run.float32(bias) if has_bias else None
    y = layer_norm(run.graph, tx, run.float32(weight), tbias, 1e-5)
    z = layer_norm(run.graph, tx, run.float32(weight), tbias, 1e-5)
    first, second = of_types(run, rounded_first)
    run.graph.add_gradient(z, first(dz))
    (dx,) = run.gradients(y, second(dy), tx)
    got_y, got_dx, got_rounded = run.run(y, dx, as_operand(run.graph, dx))
    run.compare_exactly(got_rounded, run.rounded(got_dx))
    dy, dz = (dy, run.rounded(dz)) if rounded_first else (run.rounded(dy), dz)
    x = np.asarray(x, np.float32).astype(np.float64)
    exact = formulas.layer_norm(x, weight, 1e-5, bias * has_bias)
    run.compare(got_y, exact, y.dtype, by_row=True)
    run.compare(got_dx, grad(formulas.layer_norm, dy + dz, x, weight, 1e-5), by_row=True)


@each((4, 24, True), (3, 22, True), (4, 24, False), (3, 22, False), (3, 6, True), (2, 64, False))
def check_qk_norm(run: Runner, heads: int, head_dim: int, exact_gradient: bool) -> None:
    """y and dx of each head."""
    x, weight = uneven("x", _ROWS, heads * head_dim), normal("weight", head_dim)
    compare_op(run, qk_norm, formulas.qk_norm, [x], weight, 1e-5, exact=exact_gradient, by_row=True)


@each(
    (4, 24, True), (3, 22, True), (4, 24, False), (3, 22, False), (4, 24, True, 1),
    (3, 22, False, 1), (3, 22, True, 3), (3, 6, True), (2, 64, False, 1),
)  # fmt: skip
def check_qk_layer_norm(
    run: Runner, heads: int, head_dim: int, exact_gradient: bool, biases: int = 0
) -> None:
    """y and dx of heads with weights of their own, or with one weight and one bias."""
    x, bias = (
        uneven("x", _ROWS, heads * head_dim),
        [normal("bias", biases, head_dim)] * (biases > 0),
    )
    x += 0.5 * np.abs(x).max(axis=1, keepdims=True)  # a mean to be taken away
    rest = normal("weight", biases or heads, head_dim), 1e-5, *bias
    compare_op(
        run, qk_layer_norm, formulas.qk_layer_norm, [x], *rest, exact=exact_gradient, by_row=True
    )


@each((3, 24, True), (3, 24, False), (1, 8, False), (2, 128, True))
def check_gated_rms_norm(run: Runner, heads: int, head_dim: int, exact_gradient: bool) -> None:
    """y, dx and dz of heads of all sizes, with a gradient of each type."""
    sizes = np.repeat([1.0, 2e-3, 30.0][:heads], head_dim)
    x, z, dy = (normal(name, ROWS, heads * head_dim) for name in ("x", "z", "dy"))
    x, weight = x * sizes, normal("weight", head_dim)
    z.flat[:4] = -90.0, 90.0, 0.0, -0.0
    tx, tz = run.operand(x, grad=True), run.operand(z, grad=True)
    y = gated_rms_norm(run.graph, tx, tz, run.float32(weight), 1e-5)
    cotangent = run.float32(dy) if exact_gradient else run.operand(dy)
    dx, dz = run.gradients(y, cotangent, tx, tz)
    got_y, got_dx, got_dz = run.run(y, dx, dz)
    x, z, dy = run.rounded(x), run.rounded(z), dy if exact_gradient else run.rounded(dy)
    run.compare(got_y, formulas.gated_rms_norm(x, z, weight, 1e-5), y.dtype)
    exact = grads(formulas.gated_rms_norm, dy, x, z, weight, 1e-5, of=2)
    own = np.arange(x.shape[1]) // head_dim == np.arange(heads)[:, None]
    for columns in own:  # each size by its own largest value
        run.compare(got_dx[:, columns], exact[0][:, columns], dx.dtype)
    run.compare(got_dz, exact[1], dz.dtype)
