"""The loss, logits, the embedding, and AdamW."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

import numpy as np

from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.ops.logits import logits_of_rows
from qlora_wgpu.ops.lora_ends import embedding
from qlora_wgpu.ops.loss import Objective, cross_entropy
from qlora_wgpu.ops.modules import DenseMatrix, Head
from qlora_wgpu.ops.optimizers import AdamWConfig, AdamWState, adamw
from qlora_wgpu.ops.tensor import softcap_in_place
from qlora_wgpu.reference import linear as linear_reference
from qlora_wgpu.reference import loss as loss_reference
from qlora_wgpu.reference import optimizers as optimizers_reference
from qlora_wgpu.reference.tape import grad
from qlora_wgpu.selfcheck.cases.common import KEY, ONES, ROWS, each, normal
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner

_VOCAB, _COLUMNS = 1101, 68
_BATCH = (3, 131)  # more labels than one workgroup adds up at once


def _targets(*shape: int) -> np.ndarray:
    targets = np.random.default_rng(1).integers(0, _VOCAB, shape)
    targets[:, ::3] = IGNORE_INDEX
    targets[:, 1], targets[:, 2] = 0, _VOCAB - 1
    return targets


def _head(run: Runner, head: Array, softcap: float | None, bias: Array | None = None) -> Head:
    """A head in three shards of two blocks, the logits of few rows at once."""
    g = run.graph
    g.profile = replace(g.profile, logits_bytes=4 * _VOCAB * 112, head_block=256)
    pieces = tuple((i, run.weight(head[i : i + 512])) for i in (0, 512, 1024))
    added = None if bias is None else run.float32(bias[None])
    return Head(DenseMatrix(_VOCAB, _COLUMNS, pieces), 0.7, softcap, bias=added)


@each(
    *((cap, *objective) for cap in (None, 5.0) for objective in ((0.0, 0.0), (0.1, 0.01))),
    (None, 0.0, 0.0, True), (5.0, 0.1, 0.01, True),
)  # fmt: skip
def check_cross_entropy(
    run: Runner, softcap: float | None, smoothing: float, z_loss: float, biased: bool = False
) -> None:
    """Summed loss through lm_head, and the gradient of the hidden states, in several chunks.

    Of some rows all tokens are as likely: the logarithm is taken of numbers of all sizes. A bias is
    a further column of the head, which a column of ones meets.
    """
    rows, targets = math.prod(_BATCH), _targets(*_BATCH)
    hidden, head = normal("hidden", rows, _COLUMNS), normal("head", _VOCAB, _COLUMNS)
    hidden *= np.array([0.05, 1.0])[np.arange(rows) % 2, None]
    bias = normal("bias", _VOCAB) if biased else None
    th = run.operand(hidden, grad=True)
    stats = run.float32(np.array([[1000.0, 7.0, 3.0, 4.0, 5.0]]))
    batch = run.batch(np.ones(_BATCH, np.int64), targets=targets)
    cross_entropy(
        run.graph, th, _head(run, head, softcap, bias), batch, stats, gradient=True,
        objective=Objective(smoothing, z_loss),
    )  # fmt: skip
    got_stats, got = run.run(stats, run.graph.gradient_of(th))
    hidden, head = run.rounded(hidden), run.rounded_weight(head)
    if bias is not None:
        hidden, head = np.c_[hidden, np.ones(rows)], np.c_[head, bias / 0.7]
    options = (0.7, softcap, smoothing, z_loss)
    flat = targets.ravel()
    loss = loss_reference.losses(hidden, head, flat, *options).sum()
    labels = np.sum(flat != IGNORE_INDEX)
    hits = loss_reference.hits(hidden, head, flat, 0.7, softcap).sum()
    sums = (1000.0 + loss, 7.0 + labels, 3.0, 4.0, 5.0 + hits)
    for value, exact in zip(got_stats[0], sums, strict=True):
        run.compare(value, np.array(exact))
    exact = grad(loss_reference.losses, 1.0, hidden, head, flat, *options)[:, :_COLUMNS]
    # The logits' gradient is an operand.
    run.compare(got, exact, inner=ROUNDING[run.dtype])


@each((True, False), (False, True), (True, True))
def check_weighted_loss(run: Runner, weighted: bool, confidence: bool) -> None:
    """Rows of the loss that have weights: of the data, of the model's own confidence, of both."""
    rows, targets = math.prod(_BATCH), _targets(*_BATCH)
    hidden, head = normal("hidden", rows, _COLUMNS), normal("head", _VOCAB, _COLUMNS)
    hidden *= np.array([0.05, 0.3])[np.arange(rows) % 2, None]
    given = np.random.default_rng(3).uniform(0.0, 2.0, _BATCH).astype(np.float32)
    th = run.operand(hidden, grad=True)
    stats = run.float32(np.array([[10.0, 7.0, 3.0, 4.0, 5.0]]))
    batch = run.batch(
        np.ones(_BATCH, np.int64), targets=targets, weights=given if weighted else None
    )
    objective = Objective(weighted=weighted, confidence=confidence)
    cross_entropy(
        run.graph, th, _head(run, head, None), batch, stats, gradient=True, objective=objective
    )
    got_stats, got = run.run(stats, run.graph.gradient_of(th))
    hidden, head, flat = run.rounded(hidden), run.rounded_weight(head), targets.ravel()
    losses = loss_reference.losses(hidden, head, flat, 0.7)
    weights = given.ravel()[flat != IGNORE_INDEX] if weighted else np.ones(len(losses))
    factors = weights * (np.exp(-losses) if confidence else 1.0)
    hits = loss_reference.hits(hidden, head, flat, 0.7)
    sums = 10.0 + factors @ losses, 7.0 + weights.sum(), 3.0, 4.0, 5.0 + weights @ hits
    for value, exact in zip(got_stats[0], sums, strict=True):
        run.compare(value, np.array(exact))
    exact = grad(loss_reference.losses, factors, hidden, head, flat, 0.7)
    run.compare(got, exact, inner=ROUNDING[run.dtype])


@each((None, True), (5.0, True), (None, False))
def check_logits(run: Runner, softcap: float | None, labels: bool) -> None:
    """Logits of the rows that have a label, capped, and the loss without a gradient.

    It is small, as every label is the likeliest: an error of the logarithm shows. No logit is so
    large that the cap makes it as large as others: the first of those would be the likeliest.
    """
    hidden, head = normal("hidden", ROWS, _COLUMNS), normal("head", _VOCAB, _COLUMNS)
    sizes = [0.3, 3.0] if softcap is None else [0.1, 0.3]
    hidden *= np.array(sizes)[np.arange(ROWS) % 2, None]
    exact = 0.7 * run.rounded(hidden) @ run.rounded_weight(head).T
    exact = exact if softcap is None else softcap * np.tanh(exact / softcap)
    targets = np.where(_targets(1, ROWS) == IGNORE_INDEX, IGNORE_INDEX, exact.argmax(axis=1))
    rows = np.flatnonzero(targets[0] != IGNORE_INDEX)
    batch = run.batch(ONES, targets=targets)
    first, count = 5, len(rows) - 2  # some before, and three that are none
    module, th = _head(run, head, softcap), run.operand(hidden)
    logits = logits_of_rows(run.graph, th, module, batch, first, count)
    stats = run.float32(np.array([[0.5, 7.0, 3.0, 4.0, 0.0]]))
    if labels:
        cross_entropy(run.graph, th, module, batch, stats, gradient=False)
    got, got_stats = run.run(logits, stats)
    run.compare(got[: len(rows) - first], exact[rows[first:]], by_row=True)
    if labels:
        factors = run.rounded(hidden), run.rounded_weight(head)
        loss = loss_reference.losses(*factors, targets[0], 0.7, softcap).sum()
        sums = (0.5 + loss, 7.0 + len(rows), 3.0, 4.0, float(len(rows)))
        for value, sum_ in zip(got_stats[0], sums, strict=True):
            run.compare(value, np.array(sum_))


def check_softcap(run: Runner) -> None:
    """Logits of all sizes: of each, what the cap takes away, which is little of small ones."""
    cap = 5.0
    y = np.geomspace(0.2, 40.0, 8 * ROWS).reshape(ROWS, 8) * np.sign(normal("signs", ROWS, 8))
    y = y.astype(np.float32).astype(np.float64)
    capped = run.float32(y)
    softcap_in_place(run.graph, capped, cap)
    (got,) = run.run(capped)
    run.compare(y - got, y - cap * np.tanh(y / cap), inner=2.0**-23 * np.abs(y), by_row=True)


@each((0.0, None), (5.0, KEY), (5.0, None), (0.0, None, True), (5.0, KEY, True))
def check_embedding(run: Runner, noise: float, key: int | None, tied: bool = False) -> None:
    """Looked-up rows, in two shards, and their noise; tied ones are a product's weights, too."""
    rows, columns = 83, 21
    weight = normal("weight", rows, columns)
    ids = np.random.default_rng(2).permutation(rows)[None]
    given, held = (run.weight, run.rounded_weight) if tied else (run.operand, run.rounded)
    pieces = tuple((i, given(weight[i : i + 48])) for i in (0, 48))
    batch = run.batch(np.ones_like(ids), ids, dropout_key=key, noise=noise)
    y = embedding(run.graph, DenseMatrix(rows, columns, pieces), batch, 2.0)
    (got,) = run.run(y)
    exact = 2.0 * held(weight)[ids[0]]
    if key is not None:
        most = noise / math.sqrt(rows * columns)
        module = zlib.crc32(b"neftune")
        exact += linear_reference.embedding_noise(rows, y.stride, columns, most, key, module)
    run.compare(got, exact)


def _flat(values: Array) -> Tensor:
    data = np.asarray(values, np.float32)
    return vector("flat", data.size, "float32", Storage("flat", "check", data.nbytes, data))


@each((1.0, 17.0, 1.0), (0.0, 17.0, 1.0), (1e4, 17.0, 1.0), (1.0, 0.0, 1.0), (1.0, 17.0, np.nan),
      (1.0, 17.0, np.inf), (1.0, 17.0, -np.inf), (1.0, 17.0, 1e19))  # fmt: skip
def check_optimizer(run: Runner, max_norm: float, tokens: float, factor: float) -> None:
    """Two steps of AdamW: clipped or not, without labels, and refused for their norm."""
    length, split = 1216, 500
    state = optimizers_reference.AdamW(
        normal("p", length), 0.1 * normal("m", length), 0.1 * normal("v", length) ** 2
    )
    config = AdamWConfig(weight_decay=0.1, max_grad_norm=max_norm, adam_epsilon=1e-3)
    updates = tokens > 0 and factor == 1.0
    for t in (1, 2):
        gradient = 3 * normal(f"gradient {t}", length)
        gradient[1111 if factor != 1e19 else slice(None)] *= factor
        info = np.array([1e-2, 1 - 0.9**t, np.sqrt(1 - 0.999**t), 3e-2])
        given = (state.p, gradient, state.m, state.v, info, np.array([9.0, tokens, 7.0, 7.0]))
        tp, tg, tm, tv, step, stats = map(_flat, given)
        adamw(run.graph, AdamWState(tp, tg, tm, tv, step, stats, split), config)
        p, m, v, got_stats, got_gradient = (a[0] for a in run.run(tp, tm, tv, stats, tg))
        run.graph.launches.clear()
        run.compare_exactly(got_gradient, np.zeros(length))
        if not updates:
            for got, kept in ((p, state.p), (m, state.m), (v, state.v)):
                run.compare_exactly(got, kept.astype(np.float32))
            run.compare_exactly(got_stats[3], np.array(0.0))
            is_norm = np.isfinite(got_stats[2]) == (tokens == 0 or factor == 1e19)
            run.compare_exactly(got_stats[[0, 1]], np.array([9.0, tokens]))
            run.compare_exactly(np.array(float(is_norm or factor == 1e19)), np.array(1.0))
            continue
        parts, norm = [], 0.0
        for rate in (info[0], info[3]):
            part = replace(state)
            norm = optimizers_reference.adamw(
                part, gradient, int(tokens), t, lr=rate, beta1=0.9, beta2=0.999, epsilon=1e-3,
                weight_decay=0.1, max_norm=max_norm,
            )  # fmt: skip
            parts.append(part)
        first = np.arange(length) < split
        exact = replace(parts[0], p=np.where(first, parts[0].p, parts[1].p))
        for got, value in ((p, exact.p), (m, exact.m), (v, exact.v)):
            run.compare(got, value)
        clipped = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
        for value, stat in zip(got_stats, (9.0, tokens, norm, clipped / tokens), strict=True):
            run.compare(value, np.array(stat))
        run.compare(p - state.p.astype(np.float32), exact.p - state.p, inner=1e-4)
        state = replace(exact, p=p, m=m, v=v)
