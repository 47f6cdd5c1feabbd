"""Which rows make which micro-batch, and how they are padded."""

import math

import numpy as np
import pytest

from qlora_wgpu.config import TrainConfig
from qlora_wgpu.data import IGNORE_INDEX, Example
from qlora_wgpu.errors import ShapeError
from qlora_wgpu.training.blocks import Schedule, in_order, padded_batch


def schedule(rows, batch, accumulation, **changes):
    settings = TrainConfig(
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, **changes
    )
    return Schedule.of(rows, settings)


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
    made = schedule(rows, batch, accumulation, num_train_epochs=epochs)
    assert (made.steps_per_epoch, made.total_steps) == (per_epoch, total)
    assert per_epoch == math.ceil(math.ceil(rows / batch) / accumulation)


@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 40])
@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (2, 3), (5, 1), (3, 16), (64, 2)])
def test_an_epoch_visits_every_row_once(rows, batch, accumulation):
    made = schedule(rows, batch, accumulation, num_train_epochs=3)
    for epoch in range(3):
        steps = range(epoch * made.steps_per_epoch, (epoch + 1) * made.steps_per_epoch)
        blocks = [made.blocks(step) for step in steps]
        assert all(1 <= len(step) <= accumulation for step in blocks)
        flat = [block for step in blocks for block in step]
        assert all(len(block) == batch for block in flat[:-1]) and 1 <= len(flat[-1]) <= batch
        assert sorted(np.concatenate(flat).tolist()) == list(range(rows))


def test_max_steps_goes_on_into_new_epochs():
    made = schedule(5, 1, 2, max_steps=8)
    assert made.total_steps == 8 and made.steps_per_epoch == 3
    seen = np.concatenate([b for step in range(3, 6) for b in made.blocks(step)])
    assert sorted(seen.tolist()) == list(range(5))


def test_the_order_follows_from_seed_and_epoch():
    def order(seed, epoch):
        made = schedule(50, 50, 1, seed=seed)
        return made.blocks(epoch)[0].tolist()

    orders = [order(s, e) for s in (0, 1, 2**32 - 1) for e in range(3)]
    assert len({tuple(o) for o in orders}) == 9
    np.random.seed(5)
    assert order(1, 2) == orders[5]
    # The size of steps does not change the order of rows.
    small = schedule(50, 3, 4, seed=1)
    rows = np.concatenate([b for s in range(small.steps_per_epoch) for b in small.blocks(s)])
    assert rows.tolist() == order(1, 0)


def test_dropout_keys_differ_between_micro_batches():
    keys = {
        schedule(10, 1, 1, seed=seed).dropout_key(step, block)
        for seed in range(5)
        for step in range(20)
        for block in range(20)
    }
    assert len(keys) == 5 * 20 * 20
    assert all(0 <= key < 2**32 for key in keys)


def example(length):
    return Example(np.arange(length, dtype=np.int32) + 1, np.arange(length, dtype=np.int32) + 1)


def test_a_short_batch_is_filled_with_padding():
    batch = padded_batch([example(5), example(33)], 4, 1024)
    assert batch.input_ids.shape == (4, 48)
    assert batch.attention_mask.sum(axis=1).tolist() == [5, 33, 0, 0]
    assert (batch.labels != IGNORE_INDEX).sum(axis=1).tolist() == [5, 33, 0, 0]
    assert batch.input_ids[1, :33].tolist() == list(range(1, 34))


def test_the_longest_row_bounds_the_length():
    assert padded_batch([example(40)], 1, 40).input_ids.shape == (1, 40)
    assert padded_batch([example(3)], 1, 10).input_ids.shape == (1, 10)
    with pytest.raises(ShapeError):
        padded_batch([example(41)], 1, 40)


def test_in_order():
    rows = [example(i + 1) for i in range(7)]
    chunks = list(in_order(rows, 3))
    assert [len(c) for c in chunks] == [3, 3, 1]
    assert [row for chunk in chunks for row in chunk] == rows
    assert list(in_order([], 3)) == []
