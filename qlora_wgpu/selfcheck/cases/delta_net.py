"""Gated delta nets: convolutions, gates and the delta rule."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.delta_net import causal_conv, gated_delta_gates, gated_delta_rule, short_conv
from qlora_wgpu.reference import delta_net as formulas
from qlora_wgpu.selfcheck.cases.common import ROWS, Exact, compare_op, each, normal
from qlora_wgpu.selfcheck.runner import Array, Runner, rounded

# A whole row, and packed samples, of which the first has the same number as the one before it.
_PACKED = np.array([[1] * 19, [1] * 5 + [0] + [7] * 2 + [9] * 7 + [0] * 4])


_CONVOLUTIONS = ((4, True, True), (3, False, True), (11, True, False), (4, False, False))


@each(*_CONVOLUTIONS)
def check_short_conv(run: Runner, taps: int, has_bias: bool, exact_gradient: bool) -> None:
    """y and dx of samples in two rows, with gradients of both types."""
    _compare(run, (short_conv, formulas.short_conv), 3, taps, has_bias, exact_gradient)


@each(*_CONVOLUTIONS)
def check_causal_conv(run: Runner, taps: int, has_bias: bool, exact_gradient: bool) -> None:
    """The same without gates."""
    _compare(run, (causal_conv, formulas.causal_conv), 1, taps, has_bias, exact_gradient)


def _compare(
    run: Runner, pair: tuple[Any, Any], parts: int, taps: int, has_bias: bool, exact: bool
) -> None:
    x, weight = normal("x", _PACKED.size, parts * 24), normal("weight", 24, taps)
    rest = weight, normal("bias", 24) if has_bias else None, run.batch(_PACKED)

    def formula(x: Array, weight: Array, bias: Array | None, batch: BatchBuffers) -> Any:
        return pair[1](x, weight, bias, _PACKED)

    compare_op(run, pair[0], formula, [x], *rest, exact=exact)


@each((True, True, 1.0), (True, False, 1.0), (False, True, 2.0))
def check_gated_delta_gates(
    run: Runner, wants_decay: bool, wants_beta: bool, largest: float
) -> None:
    """Decay, beta, and gradients through either or both, for operands and float32."""
    heads, exact = 11, wants_decay
    a, b = 3 * normal("a", ROWS, heads), 3 * normal("b", ROWS, heads)
    a.flat[:6] = b.flat[:6] = -90.0, 90.0, 0.0, -0.0, -12.0, 12.0
    a_log, dt_bias = np.log(np.linspace(0.01, 16, heads)), normal("dt", heads)
    inputs = [Exact(a), Exact(b)] if exact else [a, b]
    kinds = True if wants_decay else None, exact if wants_beta else None
    op, formula = gated_delta_gates, formulas.gated_delta_gates
    decay, _ = compare_op(run, op, formula, inputs, a_log, dt_bias, largest, exact=kinds)
    ta, tb = (rounded(x, "float32" if exact else run.dtype) for x in (a, b))
    exact_decay, _ = formula(ta, tb, a_log, dt_bias)
    run.compare(np.log(-decay + 1e-30), np.log(-exact_decay + 1e-30))  # including small ones


@each((True,), (False,))
def check_gated_delta_rule(run: Runner, exact_gradient: bool) -> None:
    """o and its gradients, over three chunks, two samples, and padding after them.

    The middle chunk starts with a state and passes its gradient on; every other head decays so
    slowly that chunks influence each other.
    """
    rows, heads = 135, formulas.Heads(keys=2, values=6, key_dim=24, value_dim=40)
    q, k, v = 3 * normal("q", rows, 48), 3 * normal("k", rows, 48), normal("v", rows, 240)
    decay = -np.exp(normal("decay", rows, 6) - 1)
    decay[:, ::2] *= 0.02
    beta = 1 / (1 + np.exp(-normal("beta", rows, 6)))
    segments = np.repeat([[1, 20, 0]], [19, rows - 24, 5], axis=1)
    batch = run.batch(segments)

    def op(g: Graph, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return gated_delta_rule(g, q, k, v, decay, beta, batch, *astuple(heads))

    def formula(q: Array, k: Array, v: Array, decay: Array, beta: Array) -> Any:
        return formulas.gated_delta_rule(q, k, v, decay, beta, segments, heads)

    inputs = q, k, v, Exact(decay), Exact(beta)
    compare_op(run, op, formula, inputs, exact=exact_gradient)
