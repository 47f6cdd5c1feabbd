"""What Gated DeltaNet is made of: its convolution, gates, rule and norm."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.ops.delta_net import causal_conv, gated_delta_gates, gated_delta_rule
from qlora_wgpu.ops.pointwise import gated_rms_norm, sigmoid_gate
from qlora_wgpu.reference import delta_net as delta_net_reference
from qlora_wgpu.reference import norms as norms_reference
from qlora_wgpu.reference import pointwise as pointwise_reference
from qlora_wgpu.reference.tape import grad, grads
from qlora_wgpu.selfcheck.cases.common import ROWS, SAMPLES, each, normal
from qlora_wgpu.selfcheck.runner import Runner


@each((True, True), (False, True), (True, False), (False, False))
def check_causal_conv(run: Runner, has_bias: bool, exact_gradient: bool) -> None:
    """y and dx of samples in two rows, with a gradient of each type."""
    segments, channels, taps = SAMPLES, 24, 4
    x, dy = normal("x", segments.size, channels), normal("dy", segments.size, channels)
    weight, bias = normal("weight", channels, taps), normal("bias", channels)
    tx, given = run.operand(x, grad=True), run.float32(bias) if has_bias else None
    y = causal_conv(run.graph, tx, run.float32(weight), given, run.batch(segments))
    cotangent = run.float32(dy) if exact_gradient else run.operand(dy)
    got_y, got_dx = run.run(y, *run.gradients(y, cotangent, tx))
    x, dy = run.rounded(x), dy if exact_gradient else run.rounded(dy)
    bias = bias * has_bias
    run.compare(got_y, delta_net_reference.causal_conv(x, weight, bias, segments), y.dtype)
    run.compare(
        got_dx, grad(delta_net_reference.causal_conv, dy, x, weight, bias, segments), y.dtype
    )


@each((True,), (False,))
def check_gated_rms_norm(run: Runner, exact_gradient: bool) -> None:
    """y, dx and dz of heads of all sizes, with a gradient of each type."""
    heads, head_dim = 3, 24
    sizes = np.repeat([1.0, 2e-3, 30.0], head_dim)
    x, z, dy = (normal(name, ROWS, heads * head_dim) for name in ("x", "z", "dy"))
    x, weight = x * sizes, normal("weight", head_dim)
    tx, tz = run.operand(x, grad=True), run.operand(z, grad=True)
    y = gated_rms_norm(run.graph, tx, tz, run.float32(weight), 1e-5)
    cotangent = run.float32(dy) if exact_gradient else run.operand(dy)
    dx, dz = run.gradients(y, cotangent, tx, tz)
    got_y, got_dx, got_dz = run.run(y, dx, dz)
    x, z, dy = run.rounded(x), run.rounded(z), dy if exact_gradient else run.rounded(dy)
    run.compare(got_y, norms_reference.gated_rms_norm(x, z, weight, 1e-5), y.dtype)
    exact = grads(norms_reference.gated_rms_norm, dy, x, z, weight, 1e-5, of=2)
    own = np.arange(x.shape[1]) // head_dim == np.arange(heads)[:, None]
    for columns in own:  # each size by its own largest value
        run.compare(got_dx[:, columns], exact[0][:, columns], dx.dtype)
    run.compare(got_dz, exact[1], dz.dtype)


@each((True,), (False,))
def check_sigmoid_gate(run: Runner, exact_gradient: bool) -> None:
    """y, dx and dgate, with a gradient of each type."""
    x, gate, dy = (normal(name, ROWS, 52) for name in ("x", "gate", "dy"))
    gate.flat[:4] = -90.0, 90.0, 0.0, -0.0
    tx, tgate = run.operand(x, grad=True), run.operand(gate, grad=True)
    y = sigmoid_gate(run.graph, tx, tgate)
    cotangent = run.float32(dy) if exact_gradient else run.operand(dy)
    dx, dgate = run.gradients(y, cotangent, tx, tgate)
    got_y, got_dx, got_dgate = run.run(y, dx, dgate)
    x, gate = run.rounded(x), run.rounded(gate)
    dy = dy if exact_gradient else run.rounded(dy)
    run.compare(got_y, pointwise_reference.glu(gate, x, "sigmoid"), y.dtype)
    exact_dgate, exact_dx = grads(pointwise_reference.glu, dy, gate, x, "sigmoid", of=2)
    run.compare(got_dx, exact_dx, dx.dtype)
    run.compare(got_dgate, exact_dgate, dgate.dtype)


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
    exact_decay, exact_beta = delta_net_reference.gated_delta_gates(a, b, a_log, dt_bias)
    run.compare(got_decay, exact_decay)
    run.compare(np.log(-got_decay + 1e-30), np.log(-exact_decay + 1e-30))  # the small ones, too
    run.compare(got_beta, exact_beta)
    dbeta = dbeta if exact else run.rounded(dbeta)
    ddecay, dbeta = ddecay * wants_decay, dbeta * wants_beta
    exact_da, exact_db = grads(
        delta_net_reference.gated_delta_gates, (ddecay, dbeta), a, b, a_log, dt_bias, of=2
    )
    run.compare(got_da, exact_da, da.dtype)
    run.compare(got_db, exact_db, db.dtype)


@each((True,), (False,))
def check_gated_delta_rule(run: Runner, exact_gradient: bool) -> None:
    """o and what passes back through it, over three chunks, two samples, and padding behind them.

    The middle chunk begins with a state and hands on its gradient; every other head forgets so
    little that what is left of the one counts in the other.
    """
    rows, heads = 135, delta_net_reference.Heads(keys=2, values=6, key_dim=24, value_dim=40)
    q, k = (3 * normal(name, rows, 48) for name in ("q", "k"))
    v, do = normal("v", rows, 240), normal("do", rows, 240)
    decay = -np.exp(normal("decay", rows, 6) - 1)
    decay[:, ::2] *= 0.02
    beta = 1 / (1 + np.exp(-normal("beta", rows, 6)))
    segments = np.repeat([[1, 20, 0]], [19, rows - 24, 5], axis=1)
    tq, tk, tv = (run.operand(x, grad=True) for x in (q, k, v))
    gates = run.float32(decay, grad=True), run.float32(beta, grad=True)
    o = gated_delta_rule(run.graph, tq, tk, tv, *gates, run.batch(segments), 2, 6, 24, 40)
    cotangent = run.float32(do) if exact_gradient else run.operand(do)
    gradients = run.gradients(o, cotangent, tq, tk, tv, *gates)
    got = run.run(o, *gradients)
    q, k, v = (run.rounded(x) for x in (q, k, v))
    do = do if exact_gradient else run.rounded(do)
    decay, beta = (np.asarray(x, np.float32).astype(np.float64) for x in (decay, beta))
    inputs = q, k, v, decay, beta, segments, heads
    exact = (
        delta_net_reference.gated_delta_rule(*inputs),
        *grads(delta_net_reference.gated_delta_rule, do, *inputs, of=5),
    )
    for value, expected, tensor in zip(got, exact, (o, *gradients), strict=True):
        run.compare(value, expected, tensor.dtype)
