"""Gates, activations, and other element-wise or row-wise ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.pointwise import (
    ClampedGLU,
    XIELUScalars,
    activation,
    clamped_glu,
    clip,
    glu,
    row_gate,
    scaled,
    scaled_sum,
    sigmoid_gate,
    sparse_glu,
    tanh,
    weighted_sum,
    xielu,
)
from qlora_wgpu.reference import pointwise as formulas
from qlora_wgpu.selfcheck.cases.common import ROWS, Exact, compare_op, each, normal
from qlora_wgpu.selfcheck.runner import Array, Runner

_WIDE = 2100  # more than any subgroup holds, and than a row's threads read at once
_ACTIVATIONS = ("gelu", "silu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2")


def _slopes(name: str) -> Array:
    """Inputs of an activation: normal numbers, and a range up to where it is flat on both sides."""
    x = 3 * normal(name, ROWS, 52)
    x[:, ::5] = np.linspace(-30, 30, x[:, ::5].size).reshape(ROWS, -1)
    x.flat[:6] = (
        -90.0,
        90.0,
        0.0,
        -0.0,
        2.83,
        -2.82,
    )  # where exp overflows, and erf switches its formula
    return x


@each(*((name, exact) for name in _ACTIVATIONS[:-1] for exact in (True, False)))
def check_glu(run: Runner, name: str, exact_gradient: bool) -> None:
    """SwiGLU and GeGLU with their gradients, with dy of both types."""
    inputs = [_slopes("gate"), normal("up", ROWS, 52)]
    compare_op(run, glu, formulas.glu, inputs, name, exact=exact_gradient)


@each(*((name, exact) for name in _ACTIVATIONS for exact in (True, False)))
def check_activation(run: Runner, name: str, exact_gradient: bool) -> None:
    """y and dx, with a gradient of each type."""
    compare_op(run, activation, formulas.activation, [_slopes("x")], name, exact=exact_gradient)


@each((True,), (False,))
def check_tanh(run: Runner, exact_gradient: bool) -> None:
    """y and dx, also where tanh is flat and where it is almost x."""
    compare_op(run, tanh, np.tanh, [Exact(_slopes("x"))], exact=exact_gradient)


@each(("gelu_pytorch_tanh", 52, True), ("silu", _WIDE, False), ("gelu_pytorch_tanh", 13, False))
def check_sparse_glu(run: Runner, name: str, columns: int, exact_gradient: bool) -> None:
    """y, dgate and dup, with rows of different spread."""
    gate, up = normal("gate", ROWS, columns), normal("up", ROWS, columns)
    gate = gate * np.array([0.3, 1.0, 4.0])[np.arange(ROWS) % 3, None] + 0.7
    inputs, rest = [gate, up], (name, 0.3)
    # The gate's mean and spread are sums over the row, and differences from them cancel.
    compare_op(run, sparse_glu, _sparse_glu, inputs, *rest, exact=exact_gradient, inner=1e-6)


def _sparse_glu(gate: Array, up: Array, name: str, deviations: float) -> Any:
    return formulas.sparse_glu(gate, up, name, deviations)


@each((True,), (False,))
def check_scaled_sum(run: Runner, exact_gradient: bool) -> None:
    """y and both gradients, of addends of both types."""
    x, z = normal("x", ROWS, 52), normal("z", ROWS, 52)
    compare_op(run, scaled_sum, _scaled_sum, [Exact(x), z], 0.7, exact=exact_gradient)


def _scaled_sum(x: Array, z: Array, factor: float) -> Any:
    return formulas.weighted_sum(x, z, factor, factor)


@each((True,), (False,))
def check_clip(run: Runner, exact_gradient: bool) -> None:
    """y and dx, with gradients of both types; the limit is exact in both and reached."""
    x = normal("x", ROWS, 52)
    near = 0.75 * np.linspace(0.99, 1.01, 26)  # a range with five bfloat16 numbers
    x[0], x[1] = np.concatenate([near, -near]), np.tile([0.75, -0.75, 0.0, 90.0], 13)
    compare_op(run, clip, formulas.clip, [x], 0.75, exact=exact_gradient)


@each((True,), (False,))
def check_xielu(run: Runner, exact_gradient: bool) -> None:
    """y and dx, with gradients of both types; ε is large enough to matter."""
    x, scalars = _slopes("x"), np.array([[0.7], [-0.4], [0.45], [-0.03]])
    x[:, 1::5] = np.linspace(-1.5, 0.1, x[:, 1::5].size).reshape(ROWS, -1)
    compare_op(run, _xielu, _xielu_formula, [x], *scalars, exact=exact_gradient)


def _xielu(g: Graph, x: Tensor, *scalars: Tensor) -> Tensor:
    return xielu(g, x, XIELUScalars(*scalars))


def _xielu_formula(x: Array, p: Array, n: Array, beta: Array, eps: Array) -> Any:
    return formulas.xielu(x, (p.item(), n.item(), beta.item(), eps.item()))


def check_xielu_near_zero(run: Runner) -> None:
    """exp(x) - 1 - x for small x, row by row, without the linear term that hides it."""
    x = -np.geomspace(1e-4, 1.0, ROWS)[:, None] * np.linspace(0.5, 1.0, 16)
    scalars, ones = np.array([[0.7], [30.0], [0.0], [-1e-6]]), np.ones_like(x)
    compare_op(run, _xielu, _xielu_formula, [x], *scalars, exact=True, dy=ones, by_row=True)


@each((True,), (False,))
def check_clamped_glu(run: Runner, exact_gradient: bool) -> None:
    """gpt-oss's gated unit, within its limits and beyond, with gradients of both types."""
    gate, up = 2 * normal("gate", 70, 52), 2 * normal("up", 70, 52)
    gate[:, ::5] = np.linspace(-90, 90, gate[:, ::5].size).reshape(70, -1)
    gate[:3, 1], up[:3, 1], up[3:6, 1] = 2.0, 2.0, -2.0  # exactly at the limits

    def op(g: Graph, gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
        return clamped_glu(g, gate, up, ClampedGLU(swiglu_limit=limit, swiglu_alpha=alpha))

    compare_op(run, op, formulas.clamped_glu, [gate, up], 2.0, 1.5, exact=exact_gradient)


@each((True,), (False,))
def check_sigmoid_gate(run: Runner, exact_gradient: bool) -> None:
    """y, dx and dgate, with a gradient of each type."""
    x, gate = normal("x", ROWS, 52), normal("gate", ROWS, 52)
    gate.flat[:4] = -90.0, 90.0, 0.0, -0.0

    def formula(x: Array, gate: Array) -> Any:
        return formulas.glu(gate, x, "sigmoid")

    compare_op(run, sigmoid_gate, formula, [x, gate], exact=exact_gradient)


@each((True,), (False,))
def check_row_gate(run: Runner, rounded_first: bool) -> None:
    """y, and the gradients of x, gate and residual."""
    x, skip = normal("x", ROWS, _WIDE), [Exact(normal("skip", ROWS, _WIDE))] * (not rounded_first)
    gate = 4.0 * normal("gate", ROWS, 1)
    gate[:2] = [[-95.0], [95.0]]  # where exp is far from one

    def formula(x: Array, gate: Array, *residual: Array) -> Any:
        return formulas.row_gate(x, gate) + sum(residual)

    inputs = x if rounded_first else Exact(x), Exact(gate), *skip
    allowed = 0.0, 2e-6, 0.0
    compare_op(run, row_gate, formula, inputs, exact=not rounded_first, inner_dxs=allowed)


@each((True,), (False,))
def check_scaling(run: Runner, exact_gradient: bool) -> None:
    """Matrices of both types times a stored scalar, and a sum, with gradients of both types."""
    x, z = normal("x", ROWS, 52), normal("z", ROWS, 52)
    z = run.rounded(z) if exact_gradient else np.asarray(z, np.float32).astype(np.float64)
    tz = (run.operand if exact_gradient else run.float32)(z)

    def op(g: Graph, x: Tensor, y: Tensor, scalar: Tensor) -> list[Tensor]:
        return [scaled(g, x, scalar), weighted_sum(g, y, tz, 0.7, -3.0)]

    def formula(x: Array, y: Array, scalar: Array) -> tuple[Array, Array]:
        return formulas.scaled(x, scalar.item()), formulas.weighted_sum(y, z, 0.7, -3.0)

    scalar = np.array([-0.37], np.float32).astype(np.float64)
    compare_op(run, op, formula, [Exact(x), x], scalar, exact=exact_gradient)
