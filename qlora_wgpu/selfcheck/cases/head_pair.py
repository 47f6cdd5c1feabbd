"""LoRA on the head: loss, logits, and the gradients of the hidden states, of A and of B."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.graph.tensor import padded
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.ops.logits import logits_of_rows
from qlora_wgpu.ops.loss import Objective, cross_entropy
from qlora_wgpu.ops.modules import DenseMatrix, Head
from qlora_wgpu.reference import linear as linear_reference
from qlora_wgpu.reference import loss as loss_reference
from qlora_wgpu.reference.tape import grads
from qlora_wgpu.selfcheck.cases.common import (
    KEY,
    each,
    filled_adapter,
    joined,
    normal,
    whole_gradient,
)
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner

_NAME, _VOCAB, _COLUMNS, _R = "lm_head", 1101, 68, 5
_BATCH = (3, 37)
_SCALE, _SOFTCAP, _SCALING = 0.7, 5.0, 2.0


def _targets() -> np.ndarray:
    targets = np.random.default_rng(1).integers(0, _VOCAB, _BATCH)
    targets[:, ::3] = IGNORE_INDEX
    targets[:, 1], targets[:, 2] = 0, _VOCAB - 1
    return targets


@each((0.0, False), (0.3, False), (0.3, True))
def check_head_pair(run: Runner, dropout: float, weighted: bool) -> None:
    """In several chunks of rows and blocks of the vocabulary; rows with weights are known late."""
    g, rows = run.graph, math.prod(_BATCH)
    g.profile = replace(g.profile, logits_bytes=4 * _VOCAB * 48, head_block=256)
    hidden, head = normal("hidden", rows, _COLUMNS), normal("head", _VOCAB, _COLUMNS)
    config = LoraConfig(r=_R, lora_alpha=_SCALING * _R, lora_dropout=dropout)
    adapter, parts = filled_adapter(config, [LinearSpec(_NAME, _VOCAB, _COLUMNS)])
    a, b = parts.values()
    lora = adapter.loras[_NAME]
    pieces = tuple((i, run.weight(head[i : i + 512])) for i in (0, 512, 1024))
    module = Head(DenseMatrix(_VOCAB, _COLUMNS, pieces), _SCALE, _SOFTCAP, lora)
    targets, given = _targets(), np.random.default_rng(3).uniform(0.0, 2.0, _BATCH)
    batch = run.batch(
        np.ones(_BATCH, np.int64), targets=targets, dropout_key=KEY,
        weights=given.astype(np.float32) if weighted else None,
    )  # fmt: skip
    stats, th = run.float32(np.zeros((1, 5))), run.operand(hidden, grad=True)
    objective = Objective(weighted=weighted)
    cross_entropy(g, th, module, batch, stats, gradient=True, objective=objective)
    logits = logits_of_rows(g, th, module, batch, 2, 16)
    outputs = stats, g.gradient_of(th), logits, whole_gradient(adapter)
    got_stats, got, got_logits, flat = run.run(*outputs)

    hidden, head = run.rounded(hidden), run.rounded_weight(head)
    mask = np.ones_like(hidden)
    if dropout:
        drawn = (rows, padded(_COLUMNS), _COLUMNS, dropout, KEY, lora.key)
        mask = linear_reference.dropout_mask(*drawn)
    labels = targets.ravel()
    factors = given.astype(np.float32).ravel()[labels != IGNORE_INDEX] if weighted else None
    wide = loss_reference.with_pair(hidden, head, a, b, _SCALING, mask)
    losses = loss_reference.losses(*wide, labels, _SCALE, _SOFTCAP)
    loss = losses.sum() if factors is None else factors @ losses
    run.compare(got_stats[0, 0], np.array(loss))
    plain = loss_reference.with_pair(hidden, head, a, b, _SCALING, np.ones_like(hidden))
    rows_seen = np.flatnonzero(labels != IGNORE_INDEX)[2:18]
    exact = _SCALE * plain[0][rows_seen] @ plain[1].T
    run.compare(got_logits, _SOFTCAP * np.tanh(exact / _SOFTCAP))

    def of_rows(hidden: Array, a: Array, b: Array) -> Array:
        wide = loss_reference.with_pair(hidden, head, a, b, _SCALING, mask)
        return loss_reference.losses(*wide, labels, _SCALE, _SOFTCAP)

    dy = 1.0 if factors is None else factors
    dhidden, da, db = grads(of_rows, dy, hidden, a, b, of=3)
    inner = ROUNDING[run.dtype]
    run.compare(got, dhidden, inner=inner)
    gradients = dict(zip(parts, (da, db), strict=True))
    run.compare(flat, joined(adapter, gradients), inner=inner)
