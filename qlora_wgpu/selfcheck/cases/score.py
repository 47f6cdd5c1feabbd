"""Objectives over whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.model.steps import ScoreInputs
from qlora_wgpu.ops.optimizers import STATS_LENGTH, STATS_METRICS
from qlora_wgpu.ops.score import Scoring, score
from qlora_wgpu.ops.trained import SavedModule
from qlora_wgpu.reference import score as score_reference
from qlora_wgpu.reference.tape import grads
from qlora_wgpu.selfcheck.cases.common import each, normal
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner, rounded

_SEQ, _COLUMNS, _USED = 9, 77, 70  # of more rows than one turn of a workgroup has
_BATCH = _USED + 3
_START = np.arange(STATS_LENGTH, dtype=np.float64)


def _compare(
    run: Runner, given: Scoring, targets: Array, losses: Callable[[Array], Any],
    metrics: Callable[[Array], list[float]], weight: float,
) -> None:  # fmt: skip
    """Compares scores, sums and both gradients with the reference's ``losses`` of scores."""
    rng = np.random.default_rng(7)
    rows = np.arange(_USED) * _SEQ + rng.integers(0, _SEQ, _USED)
    mask = np.ones((_BATCH, _SEQ), np.int64)
    samples = ScoreInputs(rows, targets.reshape(_USED, -1).astype(np.float32))
    batch = run.batch(mask, samples=samples)
    hidden = normal("hidden", mask.size, _COLUMNS)
    head = rounded(normal("head", given.classes, _COLUMNS) / 8, "float32")
    th, w, dw = run.operand(hidden, grad=True), run.float32(head), run.float32(np.ones_like(head))
    stats: Tensor = run.float32(_START[None])
    whole = SavedModule("score", ((0, w),), ((0, dw),))
    made = score(run.graph, th, whole, batch, stats, given, gradient=True)
    got, got_stats, got_hidden, got_head = run.run(made, stats, run.graph.gradient_of(th), dw)
    hidden, inner = run.rounded(hidden), ROUNDING[run.dtype]

    def of_both(hidden: Array, head: Array) -> Any:
        return losses(score_reference.scores(hidden, head, rows))

    z = score_reference.scores(hidden, head, rows)
    run.compare(got[0, : z.size].reshape(z.shape), z)
    sums = np.zeros(STATS_LENGTH)
    own = metrics(z)
    sums[0], sums[1] = np.sum(losses(z)), weight
    sums[STATS_METRICS : STATS_METRICS + len(own)] = own
    run.compare_each(got_stats[0], _START + sums)
    dhidden, dhead = grads(of_both, 1.0, hidden, head, of=2)
    run.compare(got_hidden, dhidden, inner=inner)
    run.compare(got_head, 1.0 + dhead, inner=inner)


@each((0.0,), (0.02,))
def check_reward_pairs(run: Runner, center: float) -> None:
    """Rewards of chosen and rejected sequences, with margins and centering."""
    margins = np.where(np.arange(_USED) % 2, 0.0, np.linspace(-1.0, 2.0, _USED))
    margins = rounded(margins, "float32")

    def losses(z: Array) -> Any:
        return score_reference.pairs(z, margins[::2], center)

    def metrics(z: Array) -> list[float]:
        a, b = z[::2, 0], z[1::2, 0]
        return [len(a), (a > b).sum(), z.sum(), (a - b).sum(), z.max(), z.min(), 1.0]

    _compare(run, Scoring("reward", center=center), margins, losses, metrics, _USED // 2)


@each((2, False), (5, True))
def check_class_scores(run: Runner, classes: int, weighted: bool) -> None:
    """Sequences of one class each, without and with weights of the classes."""
    labels = np.random.default_rng(8).integers(0, classes, _USED)
    exact = rounded(np.linspace(0.5, 3.0, classes) if weighted else np.ones(classes), "float32")
    given = Scoring(
        "classification", classes, class_weights=tuple(exact.tolist()) if weighted else ()
    )

    def losses(z: Array) -> Any:
        return score_reference.single_label(z, labels, exact)

    def metrics(z: Array) -> list[float]:
        return [_USED, (z.argmax(axis=1) == labels).sum()]

    _compare(run, given, labels.astype(np.float64), losses, metrics, exact[labels].sum())


@each(("multi_label_classification",), ("regression",))
def check_label_scores(run: Runner, problem_type: str) -> None:
    """Sequences with a target for each class."""
    classes = 3
    targets = np.random.default_rng(9).integers(0, 2, (_USED, classes)).astype(np.float64)
    given = Scoring("classification", classes, problem_type)  # type: ignore[arg-type]
    is_multi = problem_type == "multi_label_classification"

    def losses(z: Array) -> Any:
        of = score_reference.multi_label if is_multi else score_reference.regression
        return of(z, targets)

    def metrics(z: Array) -> list[float]:
        hits = ((z > 0) == (targets > 0.5)).all(axis=1).sum()
        errors = np.abs(z - targets).mean(axis=1).sum()
        return [_USED, hits if is_multi else 0.0, 0.0 if is_multi else errors]

    _compare(run, given, targets, losses, metrics, float(_USED))
