"""Norms of rows and of heads."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.offload import CheckpointPolicy
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.norms import layer_norm, rms_norm
from qlora_wgpu.ops.pointwise import gated_rms_norm, qk_layer_norm, qk_norm
from qlora_wgpu.reference import norms as formulas
from qlora_wgpu.selfcheck.cases.common import ROWS, Exact, compare_op, each, normal, uneven
from qlora_wgpu.selfcheck.runner import Array, Runner

_HELD = 250  # fits any subgroup that holds a row in its invocations
_WIDE = 2100  # more than any subgroup holds, and than a row's threads read at once
_ROWS = 171


@each((True, _HELD), (False, _HELD), (True, _WIDE), (False, _WIDE))
def check_rms_norm(run: Runner, rounded_first: bool, columns: int) -> None:
    """y, and dx of two uses, with gradients of different types; one adds to a residual.

    dx as an operand is written by the launch that adds to it.
    """
    x, skip = uneven("x", ROWS, columns), normal("skip", ROWS, columns)
    run.graph.recomputation = CheckpointPolicy(remakes=True)

    def op(g: Graph, x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
        y = rms_norm(g, x, weight, 1e-5)
        return [y, rms_norm(g, x, weight, 1e-5, residual), g.rematerialize(y)]

    def formula(x: Array, residual: Array, weight: Array) -> tuple[Array, ...]:
        y = formulas.rms_norm(x, weight, 1e-5)
        return y, y + residual, y

    inputs, weight = [Exact(x), skip if rounded_first else Exact(skip)], normal("weight", columns)
    exact = rounded_first, not rounded_first, None
    y, _, again = compare_op(run, op, formula, inputs, weight, exact=exact, by_row=True, casts=True)
    run.compare_exactly(again, y)


def check_only_norm(run: Runner) -> None:
    """RMSNorm as the only use of an operand: dx has its type."""
    run.graph.recomputation = CheckpointPolicy(remakes=True)

    def op(g: Graph, x: Tensor, weight: Tensor) -> list[Tensor]:
        y = rms_norm(g, x, weight, 1e-5)
        return [y, g.rematerialize(y)]

    def formula(x: Array, weight: Array) -> tuple[Array, ...]:
        return (formulas.rms_norm(x, weight, 1e-5),) * 2

    x, weight = uneven("x", ROWS, 52), normal("weight", 52)
    y, again = compare_op(run, op, formula, [x], weight, exact=(True, None), by_row=True)
    run.compare_exactly(again, y)


def check_wide_norm(run: Runner) -> None:
    """RMSNorm with a float32 result, of an embedding."""

    def op(g: Graph, x: Tensor, weight: Tensor) -> list[Tensor]:
        return [rms_norm(g, x, weight, 1e-5, float32=True)]

    def formula(x: Array, weight: Array) -> tuple[Array]:
        return (formulas.rms_norm(x, weight, 1e-5),)

    x, weight = uneven("x", ROWS, 52), normal("weight", 52)
    compare_op(run, op, formula, [Exact(x)], weight, exact=(True,), by_row=True)


@each((True, True), (False, True), (True, False), (False, False))
def check_layer_norm(run: Runner, has_bias: bool, rounded_first: bool) -> None:
    """y and dx of two uses, with gradients of different types; dx also as an operand."""
    x, bias = uneven("x", ROWS, _WIDE), [normal("bias", _WIDE)] * has_bias
    x += 0.5 * np.abs(x).max(axis=1, keepdims=True)  # a mean to subtract

    def op(g: Graph, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        return [layer_norm(g, x, weight, bias, 1e-5) for _ in range(2)]

    def formula(x: Array, weight: Array, bias: Array | float = 0.0) -> tuple[Array, ...]:
        return tuple(formulas.layer_norm(x, weight, 1e-5, bias) for _ in range(2))

    exact, rest = (rounded_first, not rounded_first), (normal("weight", _WIDE), *bias)
    compare_op(run, op, formula, [Exact(x)], *rest, exact=exact, by_row=True, casts=True)


@each((4, 24, True), (3, 22, True), (4, 24, False), (3, 22, False), (3, 6, True), (2, 64, False))
def check_qk_norm(run: Runner, heads: int, head_dim: int, exact_gradient: bool) -> None:
    x, weight = uneven("x", _ROWS, heads * head_dim), normal("weight", head_dim)
    compare_op(run, qk_norm, formulas.qk_norm, [x], weight, 1e-5, exact=exact_gradient, by_row=True)


@each(
    (4, 24, True), (3, 22, True), (4, 24, False), (3, 22, False), (4, 24, True, 1),
    (3, 22, False, 1), (3, 22, True, 3), (3, 6, True), (2, 64, False, 1),
)  # fmt: skip
def check_qk_layer_norm(
    run: Runner, heads: int, head_dim: int, exact_gradient: bool, biases: int = 0
) -> None:
    """y and dx of heads with separate weights, or with one weight and one bias."""
    x, bias = (
        uneven("x", _ROWS, heads * head_dim),
        [normal("bias", biases, head_dim)] * (biases > 0),
    )
    x += 0.5 * np.abs(x).max(axis=1, keepdims=True)  # a mean to subtract
    rest = normal("weight", biases or heads, head_dim), 1e-5, *bias
    compare_op(
        run, qk_layer_norm, formulas.qk_layer_norm, [x], *rest, exact=exact_gradient, by_row=True
    )


@each((3, 24, True), (3, 24, False), (1, 8, False), (2, 128, True))
def check_gated_rms_norm(run: Runner, heads: int, head_dim: int, exact_gradient: bool) -> None:
    """y, dx and dz of heads, with rows of different magnitudes and gradients of both types."""
    x, z = uneven("x", ROWS, heads * head_dim), normal("z", ROWS, heads * head_dim)
    z.flat[:4] = -90.0, 90.0, 0.0, -0.0
    rest, exact = (normal("weight", head_dim), 1e-5), exact_gradient
    op, formula = gated_rms_norm, formulas.gated_rms_norm
    compare_op(run, op, formula, [x, z], *rest, exact=exact, by_row=True)
