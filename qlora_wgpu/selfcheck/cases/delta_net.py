"""Gated delta nets: their convolutions, gates and rule."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.delta_net import causal_conv, gated_delta_gates, gated_delta_rule, short_conv
from qlora_wgpu.reference import delta_net as formulas
from qlora_wgpu.reference.tape import grads
from qlora_wgpu.selfcheck.cases.common import (
    ROWS,
    Exact,
    compare_op,
    each,
    normal,
)
from qlora_wgpu.selfcheck.runner import Array, Runner

# A whole row, and samples that are packed, of which the first has the number of the one before it.
_PACKED = np.array([[1] * 19, [1] * 5 + [0] + [7] * 2 + [9] * 7 + [0] * 4])


@each((4, True, True), (3, False, True), (11, True, False), (4, False, False))
def check_short_conv(run: Runner, taps: int, has_bias: bool, exact_gradient: bool) -> None:
    """y and dx of samples in two rows, with a gradient of each type."""
    x, weight = normal("x", _PACKED.size, 3 * 24), normal("weight", 24, taps)
    bias, batch = [normal("bias", 24)] * has_bias, run.batch(_PACKED)

    def op(g: Graph, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return short_conv(g, x, weight, bias, batch)

    def formula(x: Array, weight: Array, bias: Array | float = 0.0) -> Array:
        return formulas.short_conv(x, weight, bias, _PACKED)

    compare_op(run, op, formula, [x], weight, *bias, exact=exact_gradient)


@each((4, True, True), (3, False, True), (11, True, False), (4, False, False))
def check_causal_conv(run: Runner, taps: int, has_bias: bool, exact_gradient: bool) -> None:
    """y and dx of samples in two rows, with a gradient of each type."""
    x, weight = normal("x", _PACKED.size, 24), normal("weight", 24, taps)
    bias, batch = [normal("bias", 24)] * has_bias, run.batch(_PACKED)

    def op(g: Graph, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return causal_conv(g, x, weight, bias, batch)

    def formula(x: Array, weight: Array, bias: Array | float = 0.0) -> Array:
        return formulas.causal_conv(x, weight, bias, _PACKED)

    compare_op(run, op, formula, [x], weight, *bias, exact=exact_gradient)


@each((True, True), (True, False), (False, True))
def check_gated_delta_gates(run: Runner, wants_decay: bool, wants_beta: bool) -> None:
    """Decay, beta and what passes back through one of them or both, of operands and float32."""
    heads, exact = 11, wants_decay
    a, b = 3 * normal("a", ROWS, heads), 3 * normal("b", ROWS, heads)
    a.flat[:6] = b.flat[:6] = -90.0, 90.0, 0.0, -0.0, -12.0, 12.0
    a_log, dt_bias = np.log(np.linspace(0.01, 16, heads)), normal("dt", heads)
    given = run.float32 if exact else run.operand
    ta, tb = given(a, grad=True), given(b, grad=True)
    decay, beta = gated_delta_gates(run.graph, ta, tb, run.float32(a_log), run.float32(dt_bias))
    ddecay, dbeta = (normal(name, ROWS, heads) for name in ("ddecay", "dbeta"))
    if wants_decay:
        run.graph.add_gradient(decay, run.float32(ddecay))
    if wants_beta:
        run.graph.add_gradient(beta, given(dbeta))
    run.graph.backward()
    da, db = run.graph.gradient_of(ta), run.graph.gradient_of(tb)
    got_decay, got_beta, got_da, got_db = run.run(decay, beta, da, db)
    a, b = (a, b) if exact else (run.rounded(a), run.rounded(b))
    exact_decay, exact_beta = formulas.gated_delta_gates(a, b, a_log, dt_bias)
    run.compare(got_decay, exact_decay)
    run.compare(np.log(-got_decay + 1e-30), np.log(-exact_decay + 1e-30))  # the small ones, too
    run.compare(got_beta, exact_beta)
    dbeta = dbeta if exact else run.rounded(dbeta)
    ddecay, dbeta = ddecay * wants_decay, dbeta * wants_beta
    exact_da, exact_db = grads(
        formulas.gated_delta_gates, (ddecay, dbeta), a, b, a_log, dt_bias, of=2
    )
    run.compare(got_da, exact_da, da.dtype)
    run.compare(got_db, exact_db, db.dtype)


@each((True,), (False,))
def check_gated_delta_rule(run: Runner, exact_gradient: bool) -> None:
    """o and what passes back through it, over three chunks, two samples, and padding behind them.

    The middle chunk begins with a state and hands on its gradient; every other head forgets so
    little that what is left of the one counts in the other.
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

    def formula(q: Array, k: Array, v: Array, decay: Array, beta: Array) -> Array:
        return formulas.gated_delta_rule(q, k, v, decay, beta, segments, heads)

    inputs = q, k, v, Exact(decay), Exact(beta)
    compare_op(run, op, formula, inputs, exact=exact_gradient)
