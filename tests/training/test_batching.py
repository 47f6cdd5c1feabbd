"""Which rows make which micro-batch, and how they are padded."""

import math

import numpy as np
import pytest

from qlora_wgpu.config import Config
from qlora_wgpu.data import IGNORE_INDEX, Example
from qlora_wgpu.data.batches import pack
from qlora_wgpu.errors import ShapeError
from qlora_wgpu.training.batching import (
    BatchSampler,
    padded_batch,
    sorted_by_length,
    weight_unit,
)


def plan(rows, batch, accumulation, **changes):
    train = {
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, **changes
    }  # fmt: skip
    return BatchSampler.of(np.full(rows, 3), Config(model={"path": "m"}, train=train))


def flat(blocks):
    return [example for block in blocks for row in block for example in row]


@pytest.mark.parametrize(
    ("rows", "batch", "accumulation", "epochs", "per_epoch", "total"),
    [
        (12, 2, 3, 1, 2, 2),
        (13, 2, 3, 1, 3, 3),  # 7 batches: 3 + 3 + 1
        (13, 2, 3, 3, 3, 9),
        (13, 2, 3, 2.5, 3, 8),  # 7.5 rounded up
        (13, 2, 3, 0.1, 3, 1),
        (1, 8, 16, 1, 1, 1),
        (5, 1, 1, 2, 5, 10),
        (100, 7, 4, 1, 4, 4),
    ],
)
def test_steps_are_counted_as_hugging_face_does(
    rows, batch, accumulation, epochs, per_epoch, total
):
    batch_plan = plan(rows, batch, accumulation, num_train_epochs=epochs)
    assert (batch_plan.steps_per_epoch, batch_plan.total_steps) == (per_epoch, total)
    assert per_epoch == math.ceil(math.ceil(rows / batch) / accumulation)


@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 40])
@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (2, 3), (5, 1), (3, 16), (64, 2)])
def test_an_epoch_visits_every_row_once(rows, batch, accumulation):
    batch_plan = plan(rows, batch, accumulation, num_train_epochs=3)
    for epoch in range(3):
        steps = range(epoch * batch_plan.steps_per_epoch, (epoch + 1) * batch_plan.steps_per_epoch)
        blocks = [batch_plan.blocks(step) for step in steps]
        assert all(1 <= len(step) <= accumulation for step in blocks)
        every = [block for step in blocks for block in step]
        assert all(len(block) == batch for block in every[:-1]) and 1 <= len(every[-1]) <= batch
        assert sorted(flat(every)) == list(range(rows))


def test_max_steps_goes_on_into_new_epochs():
    batch_plan = plan(5, 1, 2, max_steps=8)
    assert batch_plan.total_steps == 8 and batch_plan.steps_per_epoch == 3
    seen = flat([b for step in range(3, 6) for b in batch_plan.blocks(step)])
    assert sorted(seen) == list(range(5))


def test_the_order_follows_from_seed_and_epoch():
    def order(seed, epoch):
        batch_plan = plan(50, 50, 1, seed=seed)
        return flat(batch_plan.blocks(epoch))

    orders = [order(s, e) for s in (0, 1, 2**32 - 1) for e in range(3)]
    assert len({tuple(o) for o in orders}) == 9
    np.random.seed(5)
    assert order(1, 2) == orders[5]
    # The size of steps does not change the order of rows.
    small = plan(50, 3, 4, seed=1)
    rows = flat([b for s in range(small.steps_per_epoch) for b in small.blocks(s)])
    assert rows == order(1, 0)


@pytest.mark.slow
def test_dropout_keys_differ_between_micro_batches():
    keys = {
        plan(10, 1, 1, seed=seed).dropout_key(step, block)
        for seed in range(5)
        for step in range(20)
        for block in range(20)
    }
    assert len(keys) == 5 * 20 * 20
    assert all(0 <= key < 2**32 for key in keys)


def example(length):
    return Example(np.arange(length, dtype=np.int32) + 1, np.arange(length, dtype=np.int32) + 1)


def test_a_short_batch_is_filled_with_padding():
    batch = padded_batch([[example(5)], [example(33)]], 4, 1024)
    assert batch.input_ids.shape == (4, 48)
    assert batch.attention_mask.sum(axis=1).tolist() == [5, 33, 0, 0]
    assert (batch.labels != IGNORE_INDEX).sum(axis=1).tolist() == [5, 33, 0, 0]
    assert batch.input_ids[1, :33].tolist() == list(range(1, 34))


def test_the_longest_row_bounds_the_length():
    assert padded_batch([[example(40)]], 1, 40).input_ids.shape == (1, 40)
    assert padded_batch([[example(3)]], 1, 10).input_ids.shape == (1, 10)
    with pytest.raises(ShapeError):
        padded_batch([[example(41)]], 1, 40)


def test_in_order():
    rows = [example(i + 1) for i in range(7)]
    chunks = list(sorted_by_length(rows, 3))
    assert [len(c) for c in chunks] == [3, 3, 1]
    # The longest first, each in a row of its own.
    assert [row for chunk in chunks for row in chunk] == [[row] for row in reversed(rows)]
    assert list(sorted_by_length([], 3)) == []


def test_rows_of_a_batch_are_about_equally_long():
    lengths = np.random.default_rng(0).integers(1, 1000, 1234)
    plain, grouped = (
        BatchSampler.of(
            lengths,
            Config(
                model={"path": "m"},
                data={"group_by_length": group},
                train={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 16},
            ),
        )
        for group in (False, True)
    )
    steps = range(plain.steps_per_epoch)
    waste = []
    for batch_plan in (plain, grouped):
        blocks = [b for s in steps for b in batch_plan.blocks(s)]
        assert sorted(flat(blocks)) == list(range(1234))
        padded = sum(len(b) * max(lengths[i] for (i,) in b) for b in blocks)
        waste.append(padded / lengths.sum())
    assert waste[1] < 1.1 < 1.4 < waste[0]
    for step in steps:  # each step has the same rows
        assert sorted(flat(plain.blocks(step))) == sorted(flat(grouped.blocks(step)))


@pytest.mark.parametrize("seed", range(5))
def test_packing(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 100, 300)
    config = Config(
        model={"path": "m"}, data={"packing": True, "max_seq_length": 128}, train={"seed": seed}
    )
    batch_plan = BatchSampler.of(lengths, config)
    assert sorted(i for row in batch_plan.rows for i in row) == list(range(300))
    assert batch_plan.lengths.tolist() == [sum(lengths[i] for i in row) for row in batch_plan.rows]
    assert batch_plan.longest <= 128
    assert len(batch_plan.rows) <= 1.1 * np.ceil(lengths.sum() / 128)
    steps = range(batch_plan.steps_per_epoch)
    assert sorted(flat([b for s in steps for b in batch_plan.blocks(s)])) == list(range(300))


def test_packing_puts_what_fits_exactly_together():
    assert pack(np.array([5, 3, 8, 2, 6]), 8) == [(0, 1), (2,), (3, 4)]
    assert pack(np.array([8, 8]), 8) == [(0,), (1,)]


@pytest.mark.parametrize(
    ("weights", "unit"),
    [([], 1.0), ([0.0], 1.0), ([0.3], 0.25), ([0.5], 0.5), ([0.99, 0.1], 0.5), ([1.0], 1.0),
     ([1.5, 3.9], 2.0), ([4.0], 4.0), ([1e30], 2.0**99)],
)  # fmt: skip
def test_weights_are_counted_in_a_power_of_two(weights, unit):
    ids, unlabelled = np.ones(2, np.int32), np.full(2, IGNORE_INDEX, np.int32)
    rows = [Example(ids, ids, weight=weight) for weight in weights]
    assert weight_unit([*rows, Example(ids, unlabelled, weight=64.0)]) == unit
