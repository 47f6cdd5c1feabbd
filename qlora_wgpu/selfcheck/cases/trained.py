"""Trained embeddings and heads: whole matrices, rows of tokens, and LoRA on both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor, pad_rows, rows_from, stored_bits
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.lora.trained_tokens import Vocabulary
from qlora_wgpu.ops.lora_ends import embedding
from qlora_wgpu.ops.loss import Objective, cross_entropy
from qlora_wgpu.ops.modules import DenseMatrix, Head, HostEmbedding
from qlora_wgpu.ops.trained import SavedModule, TrainableTokens, overwrite, write_whole
from qlora_wgpu.ops.trained_gradients import sum_up
from qlora_wgpu.reference import loss as loss_reference
from qlora_wgpu.reference.tape import grad, grads
from qlora_wgpu.selfcheck.cases.common import (
    compare_op,
    each,
    filled_adapter,
    no_ties,
    normal,
)
from qlora_wgpu.selfcheck.cases.linear import dense
from qlora_wgpu.selfcheck.cases.loss import compare_loss, targets_of
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner
from qlora_wgpu.selfcheck.runner import rounded as rounded_to

_VOCAB, _COLUMNS, _CUT = 1101, 68, 768
_BATCH, _PADDING, _UNSEEN = (3, 37), 5, 700
_SCALE, _HEAD_SCALE, _SOFTCAP, _SCALING = 2.0, 0.7, 5.0, 2.0


def _ids(*some: int) -> np.ndarray:
    """Tokens of which every third is one of ``some``, so that each of these occurs repeatedly."""
    random = np.random.default_rng(3)
    ids = random.integers(0, _VOCAB, _BATCH)
    ids[ids == _UNSEEN] = _UNSEEN + 1
    ids[:, ::3] = random.permuted(np.resize(some, (3, 13)), axis=1)
    return ids


def _compare_both_ends(
    run: Runner,
    ids: np.ndarray,
    shared: DenseMatrix,
    gradient: Callable[[], Tensor],
    held: Callable[[Array], Array],
    own: Array,
    confidence: bool,
) -> None:
    """Compares lookups, the hidden states' gradient, and that of the trained part of a matrix.

    ``held`` computes the matrix from the trained part ``own``; ``gradient`` returns the gradient,
    which starts with ones.
    """
    g = run.graph
    g.profile = replace(g.profile, logits_bytes=4 * _VOCAB * 48, head_block=256)
    hidden, dy = normal("hidden", ids.size, shared.columns), normal("dy", ids.size, shared.columns)
    targets = np.roll(ids, -1, axis=1)
    targets[:, ::4] = IGNORE_INDEX
    batch = run.batch(np.ones(_BATCH, np.int64), ids, targets)
    y, th = embedding(g, shared, batch, _SCALE), run.operand(hidden, grad=True)
    stats, head = run.float32(np.zeros((1, 5))), Head(shared, _HEAD_SCALE, _SOFTCAP)
    objective = Objective(confidence=confidence)
    cross_entropy(g, th, head, batch, stats, gradient=True, objective=objective)
    run.gradients(y, run.float32(dy))
    got, got_hidden, got_own = run.run(y, g.gradient_of(th), gradient())

    def losses(hidden: Array, own: Array) -> Any:
        return loss_reference.losses(hidden, held(own), targets.ravel(), _HEAD_SCALE, _SOFTCAP)

    def looked_up(own: Array) -> Any:
        return loss_reference.lookup(held(own), ids.ravel(), _SCALE, _PADDING)

    run.compare(got, looked_up(own))
    hidden, inner = run.rounded(hidden), ROUNDING[run.dtype]
    weights = np.exp(-losses(hidden, own)) if confidence else 1.0
    dhidden, exact = grads(losses, weights, hidden, own, of=2)
    run.compare(got_hidden, dhidden, inner=inner)
    run.compare(got_own, 1.0 + exact + grad(looked_up, dy, own), inner=inner)


def _parts(whole: Tensor) -> tuple[tuple[int, Tensor], ...]:
    """Two parts, split at another place than the matrix's own pieces."""
    first, rest = rows_from(whole, 0, _CUT), rows_from(whole, _CUT, _VOCAB - _CUT)
    return (0, first), (_CUT, rest)


@each((False,), (True,))
def check_trained_matrix(run: Runner, confidence: bool) -> None:
    """Lookups, the hidden states' gradient and the matrix's own, which starts with ones."""
    rows, ids = no_ties("rows", _VOCAB, _COLUMNS), _ids(17, 0, _VOCAB - 1, _PADDING, _CUT - 1, _CUT)
    gradient = run.float32(np.ones_like(rows))
    trained = SavedModule("embed", _parts(run.float32(rows)), _parts(gradient), _PADDING)
    shards = tuple((i, run.weight(np.zeros((n, _COLUMNS)))) for i, n in ((0, 512), (512, 589)))
    write_whole(run.graph, trained, shards)
    shared = DenseMatrix(_VOCAB, _COLUMNS, shards, whole=trained)
    own = run.rounded_weight(rows)
    _compare_both_ends(run, ids, shared, lambda: gradient, lambda w: w, own, confidence)


def check_trained_matrix_alone(run: Runner) -> None:
    """An embedding that is not the head is written in the operands' type, not the weights'."""
    rows = no_ties("rows", _VOCAB, _COLUMNS)
    trained = SavedModule("embed", _parts(run.float32(rows)), (), _PADDING)
    piece = run.operand(np.zeros_like(rows))
    write_whole(run.graph, trained, ((0, piece),))
    (got,) = run.run(piece)
    run.compare_exactly(got, run.rounded(rows))


_COLUMNS_TOKENS = 21  # not a multiple of a unit
# Both ends of the vocabulary and of its shards; a token that never occurs, and the padding token.
_TOKENS = np.array([17, 0, _VOCAB - 1, _UNSEEN, _PADDING, 511, 512])


def _ids_tokens() -> np.ndarray:
    """All but one of them repeatedly."""
    return _ids(*_TOKENS[_TOKENS != _UNSEEN])


def _trained(run: Runner, rows: Array) -> TrainableTokens:
    gradient = run.float32(np.ones_like(rows))
    names = tuple(map(int, _TOKENS))
    return TrainableTokens("embed", names, run.float32(rows), gradient, _VOCAB, _PADDING)


@each((False,), (True,))
def check_trained_rows(run: Runner, confidence: bool) -> None:
    """Rows shared by embedding and head: lookups, gradients of hidden states and of the rows."""
    g, trained = run.graph, _trained(run, rows := no_ties("rows", len(_TOKENS), _COLUMNS_TOKENS))
    matrix, weight = dense(run, normal("weight", _VOCAB, _COLUMNS_TOKENS), 512)
    overwrite(g, trained, matrix.resident)

    def summed() -> Tensor:
        sum_up(g, trained)
        return trained.gradient

    def held(rows: Array) -> Any:
        return loss_reference.overwritten(weight, _TOKENS, rows)

    shared, own = replace(matrix, trained=trained), run.rounded_weight(rows)
    _compare_both_ends(run, _ids_tokens(), shared, summed, held, own, confidence)


def check_trained_rows_of_an_embedding(run: Runner) -> None:
    """Rows of a matrix that no product reads, in the operands' type."""
    g, ids, rows = run.graph, _ids_tokens(), normal("rows", len(_TOKENS), _COLUMNS_TOKENS)
    weight, trained = normal("weight", _VOCAB, _COLUMNS_TOKENS), _trained(run, rows)
    pieces = tuple((i, run.operand(weight[i : i + 512])) for i in (0, 512, 1024))
    overwrite(g, trained, pieces)
    batch = run.batch(np.ones(_BATCH, np.int64), ids)
    (got,) = run.run(embedding(g, DenseMatrix(_VOCAB, _COLUMNS_TOKENS, pieces), batch, _SCALE))
    held = loss_reference.overwritten(run.rounded(weight), _TOKENS, run.rounded(rows))
    run.compare(got, _SCALE * held[ids.ravel()])


@each((False, False), (True, True))
def check_trained_rows_looked_up(run: Runner, rounded: bool, is_head: bool) -> None:
    """Rows of a matrix in host memory, the head if tied, and the gradient of an embedding."""
    g, ids, rows = run.graph, _ids_tokens(), normal("rows", len(_TOKENS), _COLUMNS_TOKENS)
    weight, dy = (
        normal("weight", _VOCAB, _COLUMNS_TOKENS),
        normal("dy", ids.size, _COLUMNS_TOKENS),
    )
    trained = _trained(run, rows)
    dtype = g.weight_dtype if is_head else run.dtype
    host = HostEmbedding(_VOCAB, _COLUMNS_TOKENS, dtype, trained=trained)
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

    def looked_up(rows: Array) -> Any:
        held = loss_reference.overwritten(weight, _TOKENS, rows)
        return loss_reference.lookup(held, ids.ravel(), _SCALE, _PADDING)

    run.compare(got, looked_up(rows))
    run.compare(drows, 1.0 + grad(looked_up, run.rounded(dy) if rounded else dy, rows))


_SCALE_EMBEDDING = 3.0


@each((5, None, False), (5, _PADDING, True), (80, _PADDING, False))
def check_embedding_pair(run: Runner, r: int, padding: int | None, rounded: bool) -> None:
    """Ranks that do not fill units and workgroups; gradients of both types are accumulated."""
    ids = _ids(0, _VOCAB - 1, _PADDING, 511, 512)
    config = LoraConfig(r=r, lora_alpha=_SCALING * r, target_modules=["embed"])
    ends = Vocabulary("embed", "head", _VOCAB, _COLUMNS, tied=True)
    adapter = filled_adapter(config, [], vocabulary=ends)
    matrix, weight = dense(run, normal("weight", _VOCAB, _COLUMNS), 512)
    batch, lora = run.batch(np.ones(_BATCH, np.int64), ids), adapter[0].embedding_lora

    def op(g: Graph) -> Tensor:
        return embedding(g, matrix, batch, _SCALE_EMBEDDING, lora=lora, padding=padding)

    def formula(parts: dict[str, Array]) -> Any:
        scales, (a, b) = (_SCALING, _SCALE_EMBEDDING, padding), parts.values()
        return loss_reference.lookup_with_pair(weight, ids.ravel(), a, b, *scales)

    compare_op(run, op, formula, [], exact=not rounded, adapter=adapter)


_NAME, _R = "lm_head", 5


@each((0.0, False), (0.3, False), (0.3, True))
def check_head_pair(run: Runner, dropout: float, weighted: bool) -> None:
    """Several chunks of rows and blocks of the vocabulary; weights of rows are known late.

    Hidden states are small, so that no logits become equal at the softcap.
    """
    g, rows = run.graph, math.prod(_BATCH)
    g.profile = replace(g.profile, logits_bytes=4 * _VOCAB * 48, head_block=256)
    hidden, head = 0.1 * normal("hidden", rows, _COLUMNS), normal("head", _VOCAB, _COLUMNS)
    config = LoraConfig(r=_R, lora_alpha=_SCALING * _R, lora_dropout=dropout)
    adapter = filled_adapter(config, [LinearSpec(_NAME, _VOCAB, _COLUMNS)])
    module = Head(dense(run, head, 512)[0], _HEAD_SCALE, _SOFTCAP, adapter[0].loras[_NAME])
    targets, objective = targets_of(*_BATCH), Objective(weighted=weighted)
    compare_loss(
        run, module, hidden, head, targets, objective, (0.0,) * 5, adapter=adapter, logits=(2, 16)
    )
