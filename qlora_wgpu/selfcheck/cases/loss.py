"""Loss, logits and embedding."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.ops.logits import logits_of_rows
from qlora_wgpu.ops.lora_ends import embedding
from qlora_wgpu.ops.loss import PLAIN, Objective, cross_entropy, label_losses
from qlora_wgpu.ops.modules import DenseMatrix, Head
from qlora_wgpu.ops.policy import Policy
from qlora_wgpu.ops.tensor import softcap_in_place
from qlora_wgpu.reference import linear as linear_reference
from qlora_wgpu.reference import loss as loss_reference
from qlora_wgpu.reference.tape import grads
from qlora_wgpu.selfcheck.cases.common import (
    KEY,
    ROWS,
    Adapter,
    each,
    joined,
    normal,
    whole_gradient,
)
from qlora_wgpu.selfcheck.cases.linear import dense, mask_of
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner

_VOCAB, _COLUMNS = 1101, 68
_BATCH = (3, 131)  # more labels than one workgroup sums at once


def targets_of(*shape: int) -> np.ndarray:
    """Labels of all kinds: a third are ignored, some are at the ends of the vocabulary."""
    targets = np.random.default_rng(1).integers(0, _VOCAB, shape)
    targets[:, ::3] = IGNORE_INDEX
    targets[:, 1], targets[:, 2] = 0, _VOCAB - 1
    return targets


def _head(run: Runner, head: Array, softcap: float | None, bias: Array | None = None) -> Head:
    """A head in three shards of two blocks, with logits of few rows at a time."""
    g = run.graph
    g.profile = replace(g.profile, logits_bytes=4 * _VOCAB * 112, head_block=256)
    added = None if bias is None else run.float32(bias[None])
    return Head(dense(run, head, 512)[0], 0.7, softcap, bias=added)


@each(
    *((cap, *objective) for cap in (None, 5.0) for objective in ((0.0, 0.0), (0.1, 0.01))),
    (None, 0.0, 0.0, True), (5.0, 0.1, 0.01, True),
)  # fmt: skip
def check_cross_entropy(
    run: Runner, softcap: float | None, smoothing: float, z_loss: float, biased: bool = False
) -> None:
    """Summed loss through lm_head, and the gradient of the hidden states, in several chunks.

    In some rows all tokens are equally likely: the logarithm sees numbers of all magnitudes. A bias
    is an additional column of the head for an input of one.
    """
    bias = normal("bias", _VOCAB) if biased else None
    _compare(run, 1.0, Objective(smoothing, z_loss), softcap, bias)


@each((True, False), (False, True), (True, True))
def check_weighted_loss(run: Runner, weighted: bool, confidence: bool) -> None:
    """Weighted rows of the loss: by the data, by the model's confidence, by both."""
    _compare(run, 0.3, Objective(weighted=weighted, confidence=confidence))


def _compare(
    run: Runner,
    size: float,
    objective: Objective,
    softcap: float | None = None,
    bias: Array | None = None,
) -> None:
    """Compares a loss and its gradient; half of the hidden states have another magnitude."""
    rows = math.prod(_BATCH)
    hidden, head = normal("hidden", rows, _COLUMNS), normal("head", _VOCAB, _COLUMNS)
    hidden *= np.array([0.05, size])[np.arange(rows) % 2, None]
    start = 1000.0 if size == 1.0 else 10.0, 7.0, 3.0, 4.0, 5.0
    module = _head(run, head, softcap, bias)
    compare_loss(run, module, hidden, head, targets_of(*_BATCH), objective, start, bias)


def compare_loss(
    run: Runner,
    module: Head,
    hidden: Array,
    head: Array,
    targets: np.ndarray,
    objective: Objective,
    start: Sequence[float],
    bias: Array | None = None,
    *,
    adapter: Adapter | None = None,
    before: Tensor | None = None,
    gradient: bool = True,
    logits: tuple[int, int] | None = None,
) -> None:
    """Compares a loss's sums, its gradients, and the logits of some label rows.

    d hidden is added to ``before``; an adapter's gradient starts with ones. ``logits`` is the first
    row and the number of rows.
    """
    g, lora, (layout, parts) = run.graph, module.lora, adapter or (None, {})
    given = np.random.default_rng(3).uniform(0.0, 2.0, targets.shape).astype(np.float32)
    th, stats = run.operand(hidden, grad=True), run.float32(np.array(start)[None])
    if before is not None:
        g.add_gradient(th, before)
    weights, key = given if objective.weighted else None, KEY if lora else None
    ones = np.ones(targets.shape, np.int64)
    batch = run.batch(ones, targets=targets, weights=weights, dropout_key=key)
    cross_entropy(g, th, module, batch, stats, gradient=gradient, objective=objective)
    made = [g.gradient_of(th)] if gradient else []
    made += [whole_gradient(layout)] if layout else []
    made += [logits_of_rows(g, th, module, batch, *logits)] if logits else []
    got_stats, *got = run.run(stats, *made)
    hidden, head, flat = run.rounded(hidden), run.rounded_weight(head), targets.ravel()
    mask = mask_of(lora, batch, hidden.shape[1])

    def wide(hidden: Array, *pair: Array, mask: Array = mask) -> tuple[Array, Array]:
        if bias is not None:
            ones = np.ones((len(hidden), 1))
            return np.concatenate([hidden, ones], 1), np.c_[head, bias / module.scale]
        if lora and pair:
            a, b = pair
            return loss_reference.with_pair(hidden, head, a, b, lora.scaling, mask)
        return hidden, head

    def losses_of(hidden: Array, *pair: Array) -> Any:
        bent = objective.label_smoothing, objective.z_loss
        return loss_reference.losses(*(*wide(hidden, *pair), flat, *capped, *bent))

    known, capped = (hidden, *parts.values()), (module.scale, module.softcap)
    losses, hits = losses_of(*known), loss_reference.hits(*wide(*known), flat, *capped)
    of_rows = given.ravel()[flat != IGNORE_INDEX] if objective.weighted else np.ones(len(losses))
    factors = of_rows * (np.exp(-losses) if objective.confidence else 1.0)
    sums = factors @ losses, of_rows.sum(), 0.0, 0.0, of_rows @ hits
    run.compare_each(got_stats[0], np.array(start) + np.array(sums))
    if logits is not None:
        plain, label_rows = wide(*known, mask=np.ones_like(mask)), flat != IGNORE_INDEX
        some = loss_reference.logits(*plain, *capped)[label_rows][logits[0] :][: logits[1]]
        run.compare(got.pop()[: len(some)], some, by_row=True)
    if gradient:
        dhidden, *exact = grads(losses_of, factors, *known, of=len(known))
        inner = ROUNDING[run.dtype]  # the logits' gradient is an operand
        run.compare(got[0], dhidden + (before is not None), inner=inner)
        if layout:
            by_name = dict(zip(parts, exact, strict=True))
            run.compare(got[1], joined(layout, by_name), inner=inner)


@each((None,), (5.0,))
def check_logits(run: Runner, softcap: float | None) -> None:
    """Logits of label rows, with a softcap, and the loss without a gradient.

    The loss is small, since every label is the most likely token, so that errors of the logarithm
    show. No logit is so large that the softcap makes it equal to another one.
    """
    hidden, head = normal("hidden", ROWS, _COLUMNS), normal("head", _VOCAB, _COLUMNS)
    sizes = [0.3, 3.0] if softcap is None else [0.1, 0.3]
    hidden *= np.array(sizes)[np.arange(ROWS) % 2, None]
    exact = 0.7 * run.rounded(hidden) @ run.rounded_weight(head).T
    exact = exact if softcap is None else softcap * np.tanh(exact / softcap)
    targets = np.where(targets_of(1, ROWS) == IGNORE_INDEX, IGNORE_INDEX, exact.argmax(axis=1))
    count = int((targets != IGNORE_INDEX).sum())
    start, module = (0.5, 7.0, 3.0, 4.0, 0.0), _head(run, head, softcap)
    some = 5, count - 2  # some before, and three that are not label rows
    compare_loss(run, module, hidden, head, targets, PLAIN, start, gradient=False, logits=some)


@each((None,), (5.0,))
def check_entropies(run: Runner, softcap: float | None) -> None:
    """Entropies of label rows from nearly uniform to certain, across blocks of the vocabulary."""
    hidden, head = normal("hidden", ROWS, _COLUMNS), normal("head", _VOCAB, _COLUMNS)
    hidden *= np.array([0.01, 0.3, 3.0])[np.arange(ROWS) % 3, None]
    targets, module = targets_of(1, ROWS), _head(run, head, softcap)
    batch = run.batch(np.ones((1, ROWS), np.int64), targets=targets)
    objective = Objective(policy=Policy())
    (got,) = run.run(label_losses(run.graph, run.operand(hidden), module, batch, objective))
    exact = loss_reference.entropies(
        run.rounded(hidden), run.rounded_weight(head), targets.ravel(), 0.7, softcap
    )
    run.compare(got.reshape(-1, 2)[: len(exact), 1], exact)


def check_softcap(run: Runner) -> None:
    """The softcap's change of logits of all magnitudes, which is small for small ones."""
    cap = 5.0
    y = np.geomspace(0.2, 40.0, 8 * ROWS).reshape(ROWS, 8) * np.sign(normal("signs", ROWS, 8))
    y = y.astype(np.float32).astype(np.float64)
    capped = run.float32(y)
    softcap_in_place(run.graph, capped, cap)
    (got,) = run.run(capped)
    run.compare(y - got, y - cap * np.tanh(y / cap), inner=2.0**-23 * np.abs(y), by_row=True)


@each((0.0, None), (5.0, KEY), (5.0, None), (0.0, None, True), (5.0, KEY, True))
def check_embedding(run: Runner, noise: float, key: int | None, tied: bool = False) -> None:
    """Lookups in two shards, and noise; tied ones are also a product's weights."""
    rows, columns = 83, 21
    weight = normal("weight", rows, columns)
    ids = np.random.default_rng(2).permutation(rows)[None]
    given, held = (run.weight, run.rounded_weight) if tied else (run.operand, run.rounded)
    shards = tuple((i, given(weight[i : i + 48])) for i in (0, 48))
    batch = run.batch(np.ones_like(ids), ids, dropout_key=key, noise=noise)
    y = embedding(run.graph, DenseMatrix(rows, columns, shards), batch, 2.0)
    (got,) = run.run(y)
    exact = 2.0 * held(weight)[ids[0]]
    if key is not None:
        most = noise / math.sqrt(rows * columns)
        module = zlib.crc32(b"neftune")
        exact += linear_reference.embedding_noise(rows, y.stride, columns, most, key, module)
    run.compare(got, exact)
