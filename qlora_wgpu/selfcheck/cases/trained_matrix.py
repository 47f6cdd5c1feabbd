"""A matrix that is trained whole, as the embedding and as the head at once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from qlora_wgpu.graph.tensor import Tensor, rows_from
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.ops.lora_ends import embedding
from qlora_wgpu.ops.loss import Objective, cross_entropy
from qlora_wgpu.ops.modules import DenseMatrix, Head
from qlora_wgpu.ops.trained import TrainedMatrix, write_whole
from qlora_wgpu.reference import loss as loss_reference
from qlora_wgpu.reference.tape import grad, grads
from qlora_wgpu.selfcheck.cases.common import each, no_ties, normal
from qlora_wgpu.selfcheck.runner import ROUNDING, Runner

_VOCAB, _COLUMNS, _CUT = 1101, 68, 768
_BATCH, _PADDING = (3, 37), 5
_SCALE, _HEAD_SCALE, _SOFTCAP = 2.0, 0.7, 5.0


def _ids() -> np.ndarray:
    """Tokens at both ends, of which some come several times."""
    random = np.random.default_rng(3)
    ids = random.integers(0, _VOCAB, _BATCH)
    some = np.array([17, 0, _VOCAB - 1, _PADDING, _CUT - 1, _CUT])
    ids[:, ::3] = random.permuted(np.resize(some, (3, 13)), axis=1)
    return ids


def _parts(whole: Tensor) -> tuple[tuple[int, Tensor], ...]:
    """Two parts, which are cut elsewhere than the matrix's own pieces."""
    first, rest = rows_from(whole, 0, _CUT), rows_from(whole, _CUT, _VOCAB - _CUT)
    return (0, first), (_CUT, rest)


@each((False,), (True,))
def check_trained_matrix(run: Runner, confidence: bool) -> None:
    """Lookups, the hidden states' gradient and the matrix's own, which was one before."""
    g, ids = run.graph, _ids()
    g.profile = replace(g.profile, logits_bytes=4 * _VOCAB * 48, head_block=256)
    rows, hidden = no_ties("rows", _VOCAB, _COLUMNS), normal("hidden", 111, _COLUMNS)
    dy = normal("dy", math.prod(_BATCH), _COLUMNS)
    targets = np.roll(ids, -1, axis=1)
    targets[:, ::4] = IGNORE_INDEX
    batch = run.batch(np.ones(_BATCH, np.int64), ids, targets)
    held, gradient = run.float32(rows), run.float32(np.ones_like(rows))
    trained = TrainedMatrix("embed", _parts(held), _parts(gradient), _PADDING)
    pieces = tuple((i, run.weight(np.zeros((n, _COLUMNS)))) for i, n in ((0, 512), (512, 589)))
    shared = DenseMatrix(_VOCAB, _COLUMNS, pieces, whole=trained)
    write_whole(g, trained, pieces)
    y, th = embedding(g, shared, batch, _SCALE), run.operand(hidden, grad=True)
    stats, head = run.float32(np.zeros((1, 5))), Head(shared, _HEAD_SCALE, _SOFTCAP)
    objective = Objective(confidence=confidence)
    cross_entropy(g, th, head, batch, stats, gradient=True, objective=objective)
    dhidden = g.gradient_of(th)
    g.add_gradient(y, run.float32(dy))
    g.backward()
    got, got_dhidden, got_gradient = run.run(y, dhidden, gradient)

    own = run.rounded_weight(rows)
    run.compare(got, _SCALE * own[ids.ravel()])
    factors = run.rounded(hidden), own, targets.ravel(), _HEAD_SCALE, _SOFTCAP
    weights = np.exp(-loss_reference.losses(*factors)) if confidence else 1.0
    exact_hidden, exact = grads(loss_reference.losses, weights, *factors, of=2)
    exact += grad(loss_reference.lookup, dy, own, ids.ravel(), _SCALE, _PADDING)
    inner = ROUNDING[run.dtype]
    run.compare(got_dhidden, exact_hidden, inner=inner)
    run.compare(got_gradient, 1.0 + exact, inner=inner)


def check_trained_matrix_alone(run: Runner) -> None:
    """An embedding that is no head is written as operands have it, not as weights."""
    rows = no_ties("rows", _VOCAB, _COLUMNS)
    trained = TrainedMatrix("embed", _parts(run.float32(rows)), (), _PADDING)
    piece = run.operand(np.zeros_like(rows))
    write_whole(run.graph, trained, ((0, piece),))
    (got,) = run.run(piece)
    run.compare_exactly(got, run.rounded(rows))
