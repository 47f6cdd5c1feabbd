"""Mixtures of data sets: how many examples each gives, and which."""

import numpy as np
import pytest

from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset, Example, train_test_split
from qlora_wgpu.data.mixture import ConcatDataset, MixtureSource, examples_of, interleave
from qlora_wgpu.errors import DataError
from qlora_wgpu.training.batching import BatchSampler
from qlora_wgpu.training.data import SourceCounter, source_shares


def dataset(count, first=0):
    """Examples of one token more each, none of which is another's."""
    ids = [np.arange(first + i, first + 2 * i + 2, dtype=np.int32) for i in range(count)]
    return Dataset([Example(each, each) for each in ids])


def weights(*values):
    return [MixtureSource(weight=value) for value in values]


def counts(sizes, portions, strategy="first_exhausted"):
    return examples_of(sizes, portions, strategy)


def test_without_weights_all_rows_count():
    assert counts([3, 5], [MixtureSource(), MixtureSource()]) == [3, 5]
    assert counts([3, 50], [MixtureSource(rows=9), MixtureSource(rows=0.5)]) == [9, 25]
    assert counts([3, 5], [MixtureSource(rows=0.001), MixtureSource(rows=1)]) == [1, 1]


@pytest.mark.parametrize(
    ("sizes", "given", "first", "all_"),
    [
        ([100, 100], (1, 1), [100, 100], [100, 100]),
        ([100, 300], (0.5, 0.5), [100, 100], [300, 300]),
        ([100, 300], (1, 9), [33, 300], [100, 900]),
        ([100, 300], (0.7, 0.3), [100, 42], [700, 300]),
        ([7, 7, 7], (0.1, 0.2, 0.7), [1, 2, 7], [7, 14, 49]),
        ([10, 10**6], (1, 10**6), [1, 10**6], [10, 10**7]),
        ([7, 1], (0.7, 0.1), [7, 1], [7, 1]),
        ([9, 63], (0.1, 0.7), [9, 63], [9, 63]),  # 9 / 0.1 * 0.7 is a little below 63
        ([1, 10**6], (10**6, 1), [1, 1], [10**12, 10**6]),
    ],
)
def test_weights_are_shares_of_an_epoch(sizes, given, first, all_):
    assert counts(sizes, weights(*given)) == first
    assert counts(sizes, weights(*given), "all_exhausted") == all_


def test_examples_are_those_of_the_parts():
    parts = [dataset(4), dataset(3, first=50)]
    joined = ConcatDataset(parts, ["a", "b"])
    assert len(joined) == 7 and joined.num_tokens == sum(p.num_tokens for p in parts)
    every = [example for part in parts for example in part]
    for one, two in zip(joined, every, strict=True):
        assert np.array_equal(one.input_ids, two.input_ids)
    assert joined.lengths.tolist() == [len(e) for e in every]
    assert joined.label_counts.tolist() == [e.num_label_tokens for e in every]
    assert joined.source_of.tolist() == [0] * 4 + [1] * 3
    assert joined.max_token_id == 55 and joined.counts.rows == 7
    assert joined[-1].input_ids.tolist() == every[-1].input_ids.tolist()
    with pytest.raises(IndexError):
        joined[7]


def ids(mixture):
    return [tuple(example.input_ids.tolist()) for example in mixture]


def test_a_seed_chooses_the_examples():
    parts = [dataset(40), dataset(5, first=500)]
    portions = [MixtureSource(rows=10), MixtureSource(rows=12)]
    mixed = [interleave(parts, ["a", "b"], portions, "first_exhausted", seed) for seed in (1, 1, 2)]
    assert ids(mixed[0]) == ids(mixed[1]) != ids(mixed[2])
    assert mixed[0].fingerprint == mixed[1].fingerprint != mixed[2].fingerprint
    first, second = ids(mixed[0])[:10], ids(mixed[0])[10:]
    assert len(set(first)) == 10 and set(first) <= set(ids(parts[0]))
    assert sorted(second.count(each) for each in ids(parts[1])) == [2, 2, 2, 3, 3]
    figures = source_shares(mixed[0])
    assert [(f.name, f.rows, f.of) for f in figures] == [("a", 10, 40), ("b", 12, 5)]
    assert sum(f.tokens for f in figures) == mixed[0].num_label_tokens


def test_order_and_contents_make_the_fingerprint():
    a, b = dataset(4), dataset(3, first=50)

    def fingerprint(*parts):
        return interleave(parts, "ab", [MixtureSource()] * 2, "first_exhausted", 0).fingerprint

    assert fingerprint(a, b) == fingerprint(dataset(4), dataset(3, first=50))
    assert len({fingerprint(a, b), fingerprint(b, a), fingerprint(a, a)}) == 3


def test_the_same_source_twice_has_two_names():
    mixture = interleave(
        [dataset(2)] * 3, ["x", "x", "x"], [MixtureSource()] * 3, "first_exhausted", 0
    )
    assert [f.name for f in source_shares(mixture)] == ["x", "x (2)", "x (3)"]


def pairs(count, first=0, lone=()):
    """Pairs of examples, of some of which the second is empty."""
    ids = [np.arange(first + 2 * i, first + 2 * i + 2, dtype=np.int32) for i in range(count)]
    sides = [[each, each[:0] if i in lone else each + 1000] for i, each in enumerate(ids)]
    made = Dataset([Example(each, each) for both in sides for each in both])
    made.unit = 2
    return made


@pytest.mark.parametrize("strategy", ["first_exhausted", "all_exhausted"])
def test_pairs_stay_together(strategy):
    mixture = interleave([pairs(3), pairs(8, first=100)], ["a", "b"], weights(1, 1), strategy, 3)
    assert mixture.unit == 2
    assert mixture.num_rows == (6 if strategy == "first_exhausted" else 16)
    for row in range(mixture.num_rows):
        one, two = mixture[2 * row], mixture[2 * row + 1]
        assert np.array_equal(one.input_ids + 1000, two.input_ids)
    taken = 3 if strategy == "first_exhausted" else 8
    figures = [(s.name, s.rows, s.of, s.tokens) for s in source_shares(mixture)]
    labels = int(mixture.label_counts[:2].sum())
    assert figures == [("a", taken, 3, taken * labels), ("b", taken, 8, taken * labels)]


@pytest.mark.parametrize(("objective", "packing"), [("dpo", False), ("dpo", True), ("kto", False)])
def test_rows_of_pairs_are_counted_once(objective, packing):
    """Whole epochs, and a part of one; and answers that stand alone."""
    lone = range(9) if objective == "kto" else ()
    parts = [pairs(3, lone=lone), pairs(5, 100, lone)]
    mixture = interleave(parts, ["a", "b"], [MixtureSource()] * 2, "first_exhausted", 3)
    assert [s.rows for s in source_shares(mixture)] == [3, 5]
    config = Config(
        model={"path": "m"}, data={"packing": packing, "max_seq_length": 4},
        train={
            "objective": objective, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 3, "max_steps": 9,
        },
    )  # fmt: skip
    plan = BatchSampler.of(mixture.lengths, config)
    counter = SourceCounter(mixture, plan)
    assert sum(counter.until(1).values()) == 3
    assert counter.until(plan.steps_per_epoch) == {"a": 3, "b": 5}
    assert sum(counter.until(plan.steps_per_epoch + 1).values()) == 11


def test_rows_that_are_held_out_are_of_all_sources():
    portions = [MixtureSource(rows=30), MixtureSource(rows=40)]
    mixture = interleave([dataset(30), dataset(20, 500)], "ab", portions, "first_exhausted", 0)
    train, held_out = train_test_split(mixture, 0.2, 3)
    assert not set(ids(train)) & set(ids(held_out))  # a row that is repeated is on one side
    rows = [[f.rows for f in source_shares(part)] for part in (train, held_out)]
    assert np.sum(rows, axis=0).tolist() == [30, 40] and min(rows[1]) > 0


@pytest.mark.parametrize("packing", [False, True])
def test_a_runs_rows_are_counted(packing):
    parts = [dataset(13), dataset(7, first=500)]
    mixture = interleave(
        parts, "ab", [MixtureSource(rows=9), MixtureSource(rows=10)], "first_exhausted", 0
    )
    config = Config(
        model={"path": "m"},
        data={"packing": packing, "max_seq_length": 16},
        train={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    )
    plan = BatchSampler.of(mixture.lengths, config)
    counter, seen = SourceCounter(mixture, plan), np.zeros(2, int)
    assert counter.until(0) == {"a": 0, "b": 0}
    for step in range(3 * plan.steps_per_epoch):
        trained = [i for block in plan.blocks(step) for row in block for i in row]
        seen += np.bincount(mixture.source_of[trained], minlength=2)
        assert list(counter.until(step + 1).values()) == seen.tolist()
    assert seen.tolist() == [27, 30]
    assert SourceCounter(parts[0], plan).until(3) == {}


@pytest.mark.parametrize(
    "portions", [weights(1e-29, 1e14), [MixtureSource(rows=2 * 10**9), MixtureSource()]]
)
def test_a_mixture_of_too_many_rows_is_refused(portions):
    with pytest.raises(DataError, match=r"add up to [0-9,]+ rows per epoch, more than 100,000,000"):
        interleave([dataset(2)] * 2, "ab", portions, "all_exhausted", 0)
