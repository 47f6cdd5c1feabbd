"""Objectives over answers, through the head: losses, and the gradient of the hidden states."""

import dataclasses

import numpy as np
import pytest
from support.harness import (
    PROFILES,
    VARIANTS,
    Bench,
    assert_checked,
    assert_close,
    rounded,
    tolerance,
)

from qlora_wgpu.errors import ShapeError
from qlora_wgpu.model.steps import PreferenceInputs, encode_samples
from qlora_wgpu.ops.loss import Objective, cross_entropy
from qlora_wgpu.ops.modules import DenseMatrix, Head
from qlora_wgpu.ops.optimizers import STATS_LENGTH
from qlora_wgpu.ops.preference import Preference
from qlora_wgpu.reference import loss as loss_reference
from qlora_wgpu.reference import preference as preference_reference
from qlora_wgpu.reference.tape import grad, grads
from qlora_wgpu.selfcheck.cases.preference import check_divergence

BETA, VOCAB, COLUMNS = 0.3, 83, 20
LENGTHS = ((9, 6, 12, 4), (3, 3, 14, 10))


def batch_of(bench, numbers):
    """Two rows of two pairs, the first two tokens of each sample its prompt."""
    mask = np.zeros((2, 32), np.int64)
    rng = np.random.default_rng(4)
    targets = rng.integers(0, VOCAB, mask.shape)
    for row, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths)
        mask[row, : ends[-1]] = np.repeat(np.arange(1, 5), lengths)
        targets[row, ends - 1] = targets[row, ends - np.array(lengths)] = -100
    targets[mask == 0] = -100
    references = rng.normal(-20, 2, 8).astype(np.float32)
    samples = PreferenceInputs(references, numbers.astype(np.float32))
    batch = bench.batch(mask, targets=targets, samples=samples)
    return batch, targets.ravel(), references.astype(np.float64), np.ravel(LENGTHS) - 2


def run(device, profile, dtype, given, numbers, slopes_of):
    """Compares with slopes by the answers' summed log probabilities."""
    few_rows = dataclasses.replace(PROFILES[profile], logits_bytes=16 * 4 * VOCAB)
    bench = Bench(device, dtype, few_rows)
    batch, targets, references, counts = batch_of(bench, numbers)
    rng = np.random.default_rng(10)
    hidden, head = rng.standard_normal((64, COLUMNS)), rng.standard_normal((VOCAB, COLUMNS))
    th, stats = bench.operand(hidden, grad=True), bench.given(np.zeros((1, STATS_LENGTH)))
    matrix = DenseMatrix(VOCAB, COLUMNS, ((0, bench.weight(head)),))
    objective = Objective(preference=given)
    cross_entropy(bench.graph, th, Head(matrix), batch, stats, gradient=True, objective=objective)
    got_stats, got = bench.run(stats, bench.graph.gradient_of(th))
    hidden, head = rounded(hidden, dtype), rounded(head, dtype)
    losses = loss_reference.losses(hidden, head, targets)
    logps = -np.add.reduceat(losses, np.cumsum([0, *counts[:-1]]))
    loss, slopes = slopes_of(logps, logps - references, counts)
    assert_close(got_stats[0, 0], np.array(loss), 1e-5, "sums of float32 losses")
    factors = np.repeat(-slopes, counts)
    expected = grad(loss_reference.losses, factors, hidden, head, targets)
    # Sums of rows' losses are off by some 1e-6 of themselves, which slopes pass on.
    assert_close(got, expected, 4 * tolerance(dtype, VOCAB) + 2e-5, "sums over the vocabulary")


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_pairs(device, profile, dtype, loss_type):
    def slopes_of(_, ratios, counts):
        given = (ratios[::2], ratios[1::2], loss_type, (counts[::2], counts[1::2]), BETA)
        slopes = grads(preference_reference.pairs, 1.0, *given, of=2)
        return preference_reference.pairs(*given).sum(), np.stack(slopes, axis=1).ravel()

    run(device, profile, dtype, Preference("dpo", loss_type, BETA), np.zeros(8), slopes_of)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_odds(device, profile, dtype):
    numbers = np.tile([0.25, 0.0], 4)

    def slopes_of(logps, _, counts):
        given = (*(logps / counts).reshape(-1, 2).T, BETA)
        slopes = np.stack(grads(preference_reference.odds, 1.0, *given, of=2), axis=1).ravel()
        loss = preference_reference.odds(*given).sum()
        return loss - numbers @ logps, slopes / counts - numbers

    run(device, profile, dtype, Preference("orpo", "orpo", BETA), numbers, slopes_of)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_single_answers(device, profile, dtype):
    is_good = np.arange(8) % 3 > 0

    def slopes_of(_, ratios, counts):
        given = ratios, is_good, BETA, 0.0, (1.0, 2.0)
        slopes = grad(preference_reference.singles, 1.0, *given)
        return preference_reference.singles(*given).sum(), slopes

    given = Preference("kto", "kto", BETA, 0.0, 1.0, 2.0)
    run(device, profile, dtype, given, is_good.astype(float), slopes_of)


def test_samples_that_are_not_told_of():
    segments, rows = np.array([[1, 1, 1, 4, 4, 0]]), np.array([1, 3])
    of_rows, table = encode_samples(PreferenceInputs.plain(2), segments, rows)
    assert of_rows.tolist() == [0, 2] and table[:, :2].tolist() == [[0, 1], [1, 2]]
    with pytest.raises(ShapeError, match="expected 3 samples with labels, got 2"):
        encode_samples(PreferenceInputs.plain(3), segments, rows)


@pytest.mark.parametrize("profile", PROFILES)
def test_what_kto_measures_from_is_added_to_what_there_is(device, profile):
    assert_checked(device, profile, "float32", check_divergence)
