"""Objectives over sampled completions."""

from __future__ import annotations

from typing import Any

import numpy as np

from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.steps import PolicyInputs
from qlora_wgpu.ops.optimizers import STATS_LENGTH, STATS_METRICS
from qlora_wgpu.ops.policy import Policy, policy_loss, token_weights
from qlora_wgpu.reference import policy as policy_reference
from qlora_wgpu.reference.tape import Array, grad
from qlora_wgpu.selfcheck.cases.common import each
from qlora_wgpu.selfcheck.runner import Runner

_LENGTHS = (
    150,
    3,
    40,
    11,
    70,
    65,
    2,
    33,
)  # of samples, two rows of them; the first token is a prompt
_NO_LOSS = 4  # the sample whose tokens have none
_START = np.arange(STATS_LENGTH, dtype=np.float64)
_BETA, _EPSILON, _HIGH, _DELTA = 0.04, 0.2, 0.28, 1.5


@each(
    ("grpo", False, True), ("bnpo", False, False), ("dr_grpo", True, True), ("dapo", False, True),
    ("luspo", True, False), ("cispo", False, True), ("sapo", False, True), ("grpo", True, True),
    ("rloo", True, True), ("dapo", False, True, True), ("grpo", True, True, True),
    ("dapo", False, True, False, 0.2), ("grpo", True, True, False, 0.5),
    ("cispo", True, True, False, 0.0),
)  # fmt: skip
def check_policy(
    run: Runner, loss_type: str, sequence_level: bool, corrects: bool, is_on_policy: bool = False,
    top: float = 1.0,
) -> None:  # fmt: skip
    """Ratios on both sides of both bounds, advantages of both signs and zero.

    Entropies have ties at both ends: tokens that are certain, and those that are uniform.
    """
    rng = np.random.default_rng(7)
    lengths = np.array(_LENGTHS)
    mask = np.zeros((2, lengths.reshape(2, -1).sum(axis=1).max() + 3), np.int64)
    for row, parts in enumerate(lengths.reshape(2, -1)):
        mask[row, : parts.sum()] = np.repeat(np.arange(1, len(parts) + 1), parts)
    targets = np.where(mask > 0, 1, IGNORE_INDEX)
    targets[np.diff(mask, append=0) != 0] = IGNORE_INDEX  # a sample's last token predicts nothing
    targets[1, : lengths[_NO_LOSS]] = IGNORE_INDEX
    rows = np.flatnonzero(targets.ravel() != IGNORE_INDEX)
    tokens = np.where(np.arange(len(lengths)) == _NO_LOSS, 0, lengths - 1)
    of_rows = np.repeat(np.arange(len(lengths)), tokens)
    logps = -rng.uniform(0.01, 3.0, len(rows)).astype(np.float32).astype(np.float64)
    # Apart by 0.05 from where a clipped loss has a kink.
    ratios = rng.choice([0.5, 0.75, 0.95, 1.0, 1.1, 1.23, 1.33, 1.8], len(rows))
    if sequence_level:
        ratios = rng.choice([0.7, 1.0, 1.2, 1.4], len(lengths))[of_rows]
    apart = np.log(ratios) / (tokens[of_rows] if loss_type == "rloo" else 1)
    old = (logps - apart).astype(np.float32).astype(np.float64)
    reference = (logps + rng.normal(0.0, 0.3, len(rows))).astype(np.float32).astype(np.float64)
    entropies = np.clip(rng.uniform(-0.5, 3.5, len(rows)), 0.0, 3.0).astype(np.float32)
    kept = policy_reference.has_high_entropy(entropies, top)
    advantages = np.array([1.5, -0.5, -2.0, 0.0, 0.75, -1.25, 1.0, -0.3])
    high = 1.25 if loss_type == "cispo" else _HIGH
    weights, shares = token_weights(loss_type, tokens, 300.0, 160)

    def spread(values: Array) -> Any:
        placed = np.zeros(mask.size, np.float32)
        placed[rows] = values
        return placed.reshape(mask.shape)

    given = PolicyInputs(
        shares, weights, advantages.astype(np.float32), spread(old), spread(reference), tokens > 0
    )
    if is_on_policy:  # those given are ignored
        old = logps
    batch = run.batch(mask, targets=targets, samples=given)
    losses = np.zeros((mask.size, 2))
    losses[: len(rows)] = np.stack([-logps, entropies], axis=1)
    is_summed = loss_type == "rloo"
    beta, delta = (0.0, np.inf) if is_summed else (_BETA, _DELTA)
    stats, policy = (
        run.float32(_START[None]),
        Policy(
            loss_type,
            beta,
            _EPSILON,
            high,
            None if is_summed else delta,
            sequence_level,
            1.0,
            corrects,
            top_entropy_quantile=top,
            is_on_policy=is_on_policy,
        ),
    )
    made = policy_loss(run.graph, run.float32(losses.reshape(1, -1)), batch, stats, policy)
    got_stats, got = run.run(stats, made)

    means = (of_rows == np.arange(len(lengths))[:, None]) / np.maximum(tokens, 1)[:, None]
    of_ratio = means * tokens[:, None] if is_summed else means
    wanted = advantages[of_rows]
    ratio = np.exp(logps - old)
    if sequence_level:
        ratio = np.exp(of_ratio @ (logps - old))[of_rows]

    def total(logps: Array) -> Array:
        mean_ratio = (of_ratio * (logps - old)).sum(axis=1)[of_rows] if sequence_level else None
        if loss_type == "cispo":
            loss = -np.minimum(ratio, high) * wanted * logps
            apart = reference - logps
            own = np.exp(logps - old if mean_ratio is None else mean_ratio)
            divergence = (np.exp(apart) - apart - 1) * own
            return (weights[of_rows] * (loss * kept + _BETA * divergence)).sum()
        losses = policy_reference.token_losses(
            logps, old, reference, wanted, loss_type, beta, _EPSILON, high, delta,
            mean_ratio=mean_ratio, kept=kept, corrects=corrects,
        )  # fmt: skip
        return (weights[of_rows] * losses).sum() - (advantages[_NO_LOSS] if is_summed else 0.0)

    run.compare(got[0, : len(rows)], -grad(total, 1.0, logps))
    low_clipped = (ratio < 1 - _EPSILON) & (wanted < 0)
    high_clipped = (ratio > (high if loss_type == "cispo" else 1 + high)) & (wanted > 0)
    apart = reference - logps
    divergence = (np.exp(apart) - apart - 1) * (ratio if corrects else 1.0)
    shown = np.stack([low_clipped, high_clipped])
    of_samples = shown @ means.T
    counted = of_samples if sequence_level else shown
    compared = of_samples if sequence_level else of_samples[:, tokens > 0]
    sums = _START.copy()
    sums[:2] += total(logps), shares.sum()
    sums[STATS_METRICS : STATS_METRICS + 9] += (
        0.0 if is_summed else divergence.mean(), *counted.mean(axis=1), counted.sum(axis=0).mean(),
        1.0, 1.0, compared[0].min(), compared[1].max(), entropies.mean(dtype=np.float64),
    )  # fmt: skip
    run.compare_each(got_stats[0, 1:], sums[1:])
    # The loss is a sum of terms of both signs, which may be much larger than it is.
    largest = (weights[of_rows] * np.abs(wanted) * np.maximum(ratio, 1.0)).sum()
    run.compare(np.array([got_stats[0, 0], largest]), np.array([sums[0], largest]))
