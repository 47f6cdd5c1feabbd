"""Both ends of a model and the optimizer."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.ops.adamw import AdamWConfig, AdamWState, adamw
from qlora_wgpu.ops.cross_entropy import Objective, cross_entropy, logits_of_rows
from qlora_wgpu.ops.embedding import embedding
from qlora_wgpu.ops.modules import DenseMatrix, Head
from qlora_wgpu.reference import adamw as adamw_reference
from qlora_wgpu.reference import cross_entropy as cross_entropy_reference
from qlora_wgpu.selfcheck.cases.common import ONES, ROWS, normal
from qlora_wgpu.selfcheck.runner import Array, Runner

_VOCAB = 331


def _targets() -> np.ndarray:
    targets = np.random.default_rng(1).integers(0, _VOCAB, (1, ROWS))
    targets[0, ::3] = IGNORE_INDEX
    return targets


def _loss(run: Runner, softcap: float | None, smoothing: float, z_loss: float) -> None:
    columns, targets = 20, _targets()
    hidden, head = normal("hidden", ROWS, columns), normal("head", _VOCAB, columns)
    th, stats = run.operand(hidden, grad=True), run.float32(np.zeros((1, 4)))
    matrix = DenseMatrix(_VOCAB, columns, ((0, run.operand(head)),))
    cross_entropy(
        run.graph, th, Head(matrix, 0.7, softcap), run.batch(ONES, targets=targets), stats,
        gradient=True, objective=Objective(smoothing, z_loss),
    )  # fmt: skip
    got_stats, got = run.run(stats, run.graph.gradient_of(th))
    hidden, head = run.rounded(hidden), run.rounded(head)
    options = (0.7, softcap, smoothing, z_loss)
    loss = cross_entropy_reference.forward(hidden, head, targets[0], *options)
    run.compare(got_stats[0, :2], np.array([loss, np.sum(targets != IGNORE_INDEX)]))
    run.compare(got, cross_entropy_reference.backward(hidden, head, targets[0], *options))


def check_cross_entropy(run: Runner) -> None:
    """Summed loss through lm_head, and the gradient of the hidden states."""
    _loss(run, None, 0.0, 0.0)
    _loss(run, 5.0, 0.1, 0.01)


def check_logits(run: Runner) -> None:
    """Logits of the rows that have a label, capped."""
    hidden, head = normal("hidden", ROWS, 20), normal("head", _VOCAB, 20)
    matrix = DenseMatrix(_VOCAB, 20, ((0, run.operand(head)),))
    rows = np.flatnonzero(_targets()[0] != IGNORE_INDEX)
    batch = run.batch(ONES, targets=_targets())
    head_of = Head(matrix, softcap=5.0)
    logits = logits_of_rows(run.graph, run.operand(hidden), head_of, batch, 0, len(rows))
    (got,) = run.run(logits)
    exact = run.rounded(hidden)[rows] @ run.rounded(head).T
    run.compare(got, 5.0 * np.tanh(exact / 5.0))


def check_embedding(run: Runner) -> None:
    """Looked-up rows, in two shards."""
    weight, ids = normal("weight", 83, 20), np.random.default_rng(2).integers(0, 83, (1, ROWS))
    pieces = tuple((i, run.operand(weight[i : i + 48])) for i in (0, 48))
    y = embedding(run.graph, DenseMatrix(83, 20, pieces), run.batch(ONES, ids), 2.0)
    (got,) = run.run(y)
    run.compare(got, 2.0 * run.rounded(weight)[ids[0]])


def check_optimizer(run: Runner) -> None:
    """Norm, clipping and two steps of AdamW."""
    length, config = 1216, AdamWConfig(weight_decay=0.1)
    state = adamw_reference.State(normal("p", length), np.zeros(length), np.zeros(length))

    def flat(values: Array) -> Tensor:
        data = np.asarray(values, np.float32)
        return vector("flat", data.size, "float32", Storage("flat", "check", data.nbytes, data))

    p, m, v = state.p.copy(), state.m.copy(), state.v.copy()
    for t in (1, 2):
        gradient = 3 * normal(f"gradient {t}", length)
        info = np.array([1e-2, 1 - 0.9**t, np.sqrt(1 - 0.999**t), 1e-2])
        tensors = [flat(a) for a in (p, gradient, m, v, info, np.array([9.0, 17.0, 7.0, 7.0]))]
        tp, tg, tm, tv, step, stats = tensors
        adamw(run.graph, AdamWState(tp, tg, tm, tv, step, stats), config)
        p, m, v = (a[0] for a in run.run(tp, tm, tv))
        run.graph.launches.clear()
        adamw_reference.step(
            state, gradient, 17, t, lr=1e-2, beta1=0.9, beta2=0.999, epsilon=1e-8,
            weight_decay=0.1, max_norm=1.0,
        )  # fmt: skip
    for got, exact in ((p, state.p), (m, state.m), (v, state.v)):
        run.compare(got, exact)
