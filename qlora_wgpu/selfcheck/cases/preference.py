"""Objectives over whole answers."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.steps import PreferenceInputs
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.optimizers import STATS_LENGTH
from qlora_wgpu.ops.preference import PAIR_LOSSES, Preference, divergence, preference
from qlora_wgpu.reference import preference as preference_reference
from qlora_wgpu.reference.tape import grad, grads
from qlora_wgpu.selfcheck.cases.common import each
from qlora_wgpu.selfcheck.runner import Array, Runner

_BETA, _SMOOTHING = 0.3, 0.1
_LENGTHS = (150, 90, 3, 4, 11, 60, 2, 2, 33, 12, 70, 65, 9, 8)  # of samples in two rows
_START = np.arange(STATS_LENGTH, dtype=np.float64)


class _Answers:
    """Samples of a batch, the losses of their rows, and the results in float64."""

    def __init__(self, run: Runner, *, prompts: bool = False) -> None:
        rng = np.random.default_rng(5)
        lengths = np.array(_LENGTHS)
        mask = np.zeros((2, lengths.reshape(2, -1).sum(axis=1).max() + 3), np.int64)
        for row, parts in enumerate(lengths.reshape(2, -1)):
            mask[row, : parts.sum()] = np.repeat(np.arange(1, len(parts) + 1), parts)
        targets = np.where(mask > 0, 1, IGNORE_INDEX)
        ends = np.diff(mask, append=0) != 0  # a sample's last token predicts nothing
        targets[ends] = IGNORE_INDEX
        asked = np.zeros(mask.shape, np.bool_)
        if prompts:  # of longer samples the first rows are
            places = mask * 0 + np.arange(mask.shape[1])
            begins = np.maximum.accumulate((np.diff(mask, prepend=0) > 0) * places, axis=1)
            long = np.repeat(lengths > 3, lengths)
            asked[mask > 0] = long & ((places - begins)[mask > 0] < 2)
        self.count = len(lengths)
        self.of_rows = np.repeat(np.arange(self.count), lengths - 1)
        self.is_answer = ~asked[targets != IGNORE_INDEX]
        self.losses = rng.uniform(0.01, 0.1, len(self.of_rows))
        self.references = rng.normal(-1.0, 1.0, self.count).astype(np.float32).astype(np.float64)
        self.numbers = rng.integers(0, 2, self.count).astype(np.float64)
        if prompts:
            self.numbers = np.where(np.arange(self.count) % 2, 0.0, 0.25)
        samples = PreferenceInputs(
            self.references.astype(np.float32), self.numbers.astype(np.float32), asked
        )
        self.batch: BatchBuffers = run.batch(mask, targets=targets, samples=samples)
        given = np.zeros((mask.size, 2))
        given[: len(self.losses), 0] = self.losses
        self.hits = rng.integers(0, 2, len(self.losses)).astype(np.float64)
        given[: len(self.losses), 1] = self.hits
        self.given = run.float32(given.reshape(1, -1))
        own = np.zeros(self.count)
        np.subtract.at(own, self.of_rows[self.is_answer], self.losses[self.is_answer])
        self.logps = own
        counts = np.bincount(self.of_rows[self.is_answer], minlength=self.count)
        self.counts: Array = counts.astype(np.float64)
        self.ratios = own - self.references

    @property
    def of_chosen(self) -> Array:
        """The number of correct labels of chosen answers, and of all."""
        chosen = self.is_answer & (self.of_rows % 2 == 0)
        return np.array([self.hits[chosen].sum(), chosen.sum()])

    def factors(self, slopes: Array) -> Array:
        """The factors of rows' losses, from the derivatives by the answers' log probabilities."""
        return np.where(self.is_answer, -slopes[self.of_rows], 0.0)


def _compare(
    run: Runner, answers: _Answers, given: Preference, factors: Array, sums: Array
) -> None:
    stats = run.float32(_START[None])
    made = preference(run.graph, answers.given, answers.batch, stats, given)
    got_stats, got = run.run(stats, made)
    run.compare(got[0, : len(factors)], factors)
    run.compare_each(got_stats[0], _START + sums)


@each(*((name,) for name in PAIR_LOSSES))
def check_pairs(run: Runner, loss_type: str) -> None:
    """DPO's losses over pairs of answers, short and long, with large and small margins."""
    answers = _Answers(run)
    given = Preference("dpo", loss_type, _BETA, _SMOOTHING)
    a, b, counts = answers.ratios[::2], answers.ratios[1::2], answers.counts
    counts = counts + answers.numbers  # without a prompt, one token has no label
    given_pairs = a, b, loss_type, (counts[::2], counts[1::2]), _BETA, _SMOOTHING
    losses = preference_reference.pairs(*given_pairs)
    slopes = np.stack(grads(preference_reference.pairs, 1.0, *given_pairs, of=2), axis=1).ravel()
    sums = np.zeros(STATS_LENGTH)
    sums[[0, 1, 12, 13]] = losses.sum(), *3 * [len(a)]
    sums[8:12] = (
        _BETA * a.sum(),
        _BETA * b.sum(),
        answers.logps[::2].sum(),
        answers.logps[1::2].sum(),
    )
    sums[14], sums[20:] = (a > b).sum(), answers.of_chosen
    _compare(run, answers, given, answers.factors(slopes), sums)


def check_odds(run: Runner) -> None:
    """ORPO: the odds ratio of two answers, and the likelihood of the chosen with its prompt."""
    answers = _Answers(run, prompts=True)
    means = answers.logps / answers.counts
    a, b = means[::2], means[1::2]
    losses = preference_reference.odds(a, b, _BETA)
    slopes = np.stack(grads(preference_reference.odds, 1.0, a, b, _BETA, of=2), axis=1).ravel()
    slopes = slopes / answers.counts
    likelihood = answers.numbers[answers.of_rows]
    odds, nll = preference_reference.log_odds(a, b), float(likelihood @ answers.losses)
    sums = np.zeros(STATS_LENGTH)
    sums[[0, 1, 12, 13]] = losses.sum() + nll, *3 * [len(a)]
    sums[8:12] = _BETA * a.sum(), _BETA * b.sum(), a.sum(), b.sum()
    sums[14:18] = (a > b).sum(), nll, -np.logaddexp(0, -odds).sum(), odds.sum()
    sums[20:] = answers.of_chosen
    factors = answers.factors(slopes) + likelihood
    _compare(run, answers, Preference("orpo", "orpo", _BETA), factors, sums)


@each(("kto",), ("apo_zero_unpaired",))
def check_singles(run: Runner, loss_type: str) -> None:
    """KTO: desirable and undesirable answers, with a KL term from the sums."""
    answers = _Answers(run)
    weights = (1.5, 0.5)
    given = Preference("kto", loss_type, _BETA, 0.0, *weights)
    is_good = answers.numbers > 0
    from_where = float(_START[18] / _START[19]) if loss_type == "kto" else 0.0
    singles = answers.ratios, is_good, _BETA, from_where, weights
    losses = preference_reference.singles(*singles)
    slopes = grad(preference_reference.singles, 1.0, *singles)
    sums = np.zeros(STATS_LENGTH)
    sums[:2] = losses.sum(), len(losses)
    for at, chosen in ((0, is_good), (1, ~is_good)):
        sums[8 + at] = _BETA * answers.ratios[chosen].sum()
        sums[10 + at], sums[12 + at] = answers.logps[chosen].sum(), chosen.sum()
    _compare(run, answers, given, answers.factors(slopes), sums)


def check_divergence(run: Runner) -> None:
    """The divergence of answers' log probabilities from the reference's."""
    answers = _Answers(run)
    stats = run.float32(_START[None])
    divergence(run.graph, answers.given, answers.batch, stats)
    (got,) = run.run(stats)
    exact = _START.copy()
    exact[18:20] += answers.ratios.sum(), answers.count
    run.compare(got[0], exact)
