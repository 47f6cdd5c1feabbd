"""Trained rows of an embedding and of a head, which may be the same."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from qlora_wgpu.graph.tensor import pad_rows, stored_bits
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.ops.lora_ends import embedding
from qlora_wgpu.ops.loss import Objective, cross_entropy
from qlora_wgpu.ops.modules import DenseMatrix, Head, HostMatrix
from qlora_wgpu.ops.trained import TrainedRows, overwrite
from qlora_wgpu.ops.trained_gradients import sum_up
from qlora_wgpu.reference import loss as loss_reference
from qlora_wgpu.reference.tape import grad, grads
from qlora_wgpu.selfcheck.cases.common import each, no_ties, normal
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner
from qlora_wgpu.selfcheck.runner import rounded as rounded_to

_VOCAB, _COLUMNS = 1101, 21
_BATCH = (3, 37)
_PADDING, _UNSEEN = 5, 700
# Both ends of the vocabulary, and of its shards; a token that never comes, and that of padding.
_TOKENS = np.array([17, 0, _VOCAB - 1, _UNSEEN, _PADDING, 511, 512])
_SCALE, _HEAD_SCALE, _SOFTCAP = 2.0, 0.7, 5.0


def _ids() -> np.ndarray:
    """Tokens of which every third is trained, so that each comes several times."""
    random = np.random.default_rng(3)
    ids = random.integers(0, _VOCAB, _BATCH)
    ids[ids == _UNSEEN] = _UNSEEN + 1
    ids[:, ::3] = random.permuted(np.resize(_TOKENS[_TOKENS != _UNSEEN], (3, 13)), axis=1)
    return ids


def _trained(run: Runner, rows: Array) -> TrainedRows:
    """The rows, with a gradient that was one before."""
    gradient = run.float32(np.ones_like(rows))
    names = tuple(map(int, _TOKENS))
    return TrainedRows("embed", names, run.float32(rows), gradient, _VOCAB, _PADDING)


def _pieces(run: Runner, weight: Array) -> DenseMatrix:
    pieces = tuple((i, run.weight(weight[i : i + 512])) for i in (0, 512, 1024))
    return DenseMatrix(_VOCAB, _COLUMNS, pieces)


@each((False,), (True,))
def check_trained_rows(run: Runner, confidence: bool) -> None:
    """Rows that both ends share: lookups, the hidden states' gradient, and the rows' own."""
    g, ids, rows = run.graph, _ids(), no_ties("rows", len(_TOKENS), _COLUMNS)
    g.profile = replace(g.profile, logits_bytes=4 * _VOCAB * 48, head_block=256)
    weight, hidden = normal("weight", _VOCAB, _COLUMNS), normal("hidden", 111, _COLUMNS)
    dy = normal("dy", math.prod(_BATCH), _COLUMNS)
    targets = np.roll(ids, -1, axis=1)
    targets[:, ::4] = IGNORE_INDEX
    batch = run.batch(np.ones(_BATCH, np.int64), ids, targets)
    trained = _trained(run, rows)
    shared = replace(_pieces(run, weight), trained=trained)
    overwrite(g, trained, shared.pieces)
    y, th = embedding(g, shared, batch, _SCALE), run.operand(hidden, grad=True)
    stats, head = run.float32(np.zeros((1, 5))), Head(shared, _HEAD_SCALE, _SOFTCAP)
    objective = Objective(confidence=confidence)
    cross_entropy(g, th, head, batch, stats, gradient=True, objective=objective)
    run.gradients(y, run.float32(dy), trained.rows)
    sum_up(g, trained)
    got, dhidden, drows = run.run(y, g.gradient_of(th), trained.gradient)

    weight, own = run.rounded_weight(weight), run.rounded_weight(rows)
    labels = targets.ravel(), _HEAD_SCALE, _SOFTCAP

    def of_rows(hidden: Array, rows: Array) -> Array:
        return loss_reference.losses(
            hidden, loss_reference.overwritten(weight, _TOKENS, rows), *labels
        )

    def looked_up(rows: Array) -> Array:
        held = loss_reference.overwritten(weight, _TOKENS, rows)
        return loss_reference.lookup(held, ids.ravel(), _SCALE, _PADDING)

    run.compare(got, looked_up(own))
    weights = np.exp(-of_rows(run.rounded(hidden), own)) if confidence else 1.0
    exact_hidden, exact = grads(of_rows, weights, run.rounded(hidden), own, of=2)
    run.compare(dhidden, exact_hidden, inner=ROUNDING[run.dtype])
    exact += grad(looked_up, dy, own)
    run.compare(drows, 1.0 + exact, inner=ROUNDING[run.dtype])


def check_trained_rows_of_an_embedding(run: Runner) -> None:
    """Rows of a matrix that no product reads, which is of the operands' type."""
    g, ids, rows = run.graph, _ids(), normal("rows", len(_TOKENS), _COLUMNS)
    weight, trained = normal("weight", _VOCAB, _COLUMNS), _trained(run, rows)
    pieces = tuple((i, run.operand(weight[i : i + 512])) for i in (0, 512, 1024))
    overwrite(g, trained, pieces)
    batch = run.batch(np.ones(_BATCH, np.int64), ids)
    (got,) = run.run(embedding(g, DenseMatrix(_VOCAB, _COLUMNS, pieces), batch, _SCALE))
    held = loss_reference.overwritten(run.rounded(weight), _TOKENS, run.rounded(rows))
    run.compare(got, _SCALE * held[ids.ravel()])


@each((False, False), (True, True))
def check_trained_rows_looked_up(run: Runner, rounded: bool, is_head: bool) -> None:
    """Rows of a matrix in host memory, the head's if tied, and the gradient of an embedding."""
    g, ids, rows = run.graph, _ids(), normal("rows", len(_TOKENS), _COLUMNS)
    weight, dy = normal("weight", _VOCAB, _COLUMNS), normal("dy", ids.size, _COLUMNS)
    trained = _trained(run, rows)
    dtype = g.weight_dtype if is_head else run.dtype
    host = HostMatrix(_VOCAB, _COLUMNS, dtype, trained=trained)
    batch = run.batch(np.ones(_BATCH, np.int64), ids)
    table = batch.rows_of(host).table
    held = stored_bits(pad_rows(weight[ids.ravel()].astype(np.float32)), dtype)
    assert table.storage is not None
    table.storage.data = held
    y = embedding(g, host, batch, _SCALE)
    cotangent = (run.operand if rounded else run.float32)(dy)
    run.gradients(y, cotangent, trained.rows)
    sum_up(g, trained)
    got, drows = run.run(y, trained.gradient)
    weight, rows = rounded_to(weight, dtype), rounded_to(rows, dtype)

    def looked_up(rows: Array) -> Array:
        held = loss_reference.overwritten(weight, _TOKENS, rows)
        return loss_reference.lookup(held, ids.ravel(), _SCALE, _PADDING)

    run.compare(got, looked_up(rows))
    run.compare(drows, 1.0 + grad(looked_up, run.rounded(dy) if rounded else dy, rows))
