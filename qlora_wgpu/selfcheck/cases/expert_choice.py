"""The choice of a token's experts by scores, and what comes back to the router."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from qlora_wgpu.kernels.common import EXPERT_TILE
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.ops.optimizers import STATS_BALANCE, STATS_LENGTH
from qlora_wgpu.ops.routing import (
    Scoring,
    balance_loss,
    balance_sums,
    largest,
    route,
    route_by_scores,
)
from qlora_wgpu.reference import experts as experts_reference
from qlora_wgpu.reference.tape import grad
from qlora_wgpu.selfcheck.cases.common import each, normal
from qlora_wgpu.selfcheck.runner import Array, Runner

_ROWS, _EXPERTS, _TOP_K = 150, 12, 3
_INNER = 4e-6  # exp is good to 1e-6


def _logits() -> Array:
    """Router's outputs, far enough apart for float32; some are equal, some are far from zero."""
    order = np.argsort(normal("order", _ROWS, _EXPERTS), axis=1)
    logits = 0.4 * order + 0.03 * normal("logits", _ROWS, _EXPERTS) - 2.0
    logits[1::5, 7] = logits[1::5, 3]
    logits[::7] *= 6.0
    exact: Array = logits.astype(np.float32).astype(np.float64)
    return exact


@each(
    (Scoring(True, True, least=1e-20, scale=1.7, pairs=True, groups=4, top_groups=2),),
    (Scoring(True, True, least=0.4),),
    (Scoring(True, False, scale=0.5),),
    (Scoring(False, True, least=0.35, at_least=True),),
    (Scoring(False, False, groups=3, top_groups=1, scale=2.0),),
)
def check_expert_scores(run: Runner, scoring: Scoring) -> None:
    """Slots, weights and the gradient of the logits; with corrections and without."""
    sigmoid, has_bias = scoring.sigmoid, scoring.normalized
    rule = experts_reference.Rule(**asdict(scoring))
    logits, dweights = _logits(), normal("dweights", _ROWS, _TOP_K)
    bias = (0.3 * normal("bias", _EXPERTS)).astype(np.float32).astype(np.float64) * has_bias
    tlogits = run.float32(logits, grad=True)
    tbias = run.float32(bias) if has_bias else None
    routing = route_by_scores(run.graph, tlogits, tbias, _TOP_K, scoring)
    given = (run.float32 if sigmoid else run.operand)(dweights)
    gradients = run.gradients(routing.weights, given, tlogits)
    got_slots, got_weights, got = run.run(routing.slots, routing.weights, *gradients)
    dweights = dweights if sigmoid else run.rounded(dweights)
    ids, weights = experts_reference.route_by_scores(logits, bias, _TOP_K, rule)
    slots, _ = experts_reference.slots_of(ids, _EXPERTS, EXPERT_TILE)
    run.compare_exactly(got_slots, slots.astype(np.float64))
    run.compare(got_weights, weights, inner=_INNER)
    exact = grad(experts_reference.weights_of, dweights, logits, ids, rule)
    run.compare(got, exact, inner=_INNER)


@each((True,), (False,))
def check_scaled_weights(run: Runner, normalized: bool) -> None:
    """The weights of the largest logits times a factor, and the gradient of the logits."""
    logits, dweights, scale = _logits(), normal("dweights", _ROWS, _TOP_K), 0.3
    tlogits = run.float32(logits, grad=True)
    routing = route(run.graph, tlogits, _TOP_K, normalized=normalized, scale=scale)
    gradients = run.gradients(routing.weights, run.float32(dweights), tlogits)
    got_weights, got = run.run(routing.weights, *gradients)
    ids, weights = experts_reference.route(logits, _TOP_K, normalized=normalized)
    run.compare(got_weights, scale * weights, inner=_INNER)
    exact = grad(
        experts_reference.softmax_weights, scale * dweights, logits, ids, normalized=normalized
    )
    run.compare(got, exact, inner=_INNER)


@each((True,), (False,))
def check_balance_of_experts(run: Runner, weighted: bool) -> None:
    """The loss of two layers' choices, some rows of padding, and the gradients of their logits."""
    g, coefficient, count = run.graph, 0.4, 9
    weights = np.abs(normal("weights", 1, _ROWS)).astype(np.float32) if weighted else None
    labels = float(count) if weights is None else float(weights[0, :count].sum())
    segments = np.repeat([[1, 30, 0]], [29, _ROWS - 36, 7], axis=1)
    targets = np.where(np.arange(_ROWS) < count, 1, IGNORE_INDEX)[None]
    batch, layers = (
        run.batch(segments, targets=targets, weights=weights),
        [_logits(), _logits()[::-1]],
    )
    given = [run.float32(logits, grad=True) for logits in layers]
    stats = run.float32(np.ones((1, STATS_LENGTH)))
    sums = balance_sums(g, given[0], largest(g, given[0], _TOP_K), batch)
    sums = balance_sums(g, given[1], largest(g, given[1], _TOP_K), batch, sums)
    balance_loss(g, sums, _TOP_K, batch, stats, coefficient)
    g.backward()
    got_stats, *got = run.run(stats, *(g.gradient_of(logits) for logits in given))
    mask = (segments > 0).astype(np.float64).ravel()
    expected = np.ones((1, STATS_LENGTH))
    expected[0, STATS_BALANCE] += labels * experts_reference.balance_loss(layers, _TOP_K, mask)
    run.compare(got_stats, expected, inner=_INNER)
    for ours, exact in zip(
        got, grad(experts_reference.balance_loss, 1.0, layers, _TOP_K, mask), strict=True
    ):
        run.compare(ours, labels * coefficient * exact, inner=_INNER)
