"""Order and padding: functions of their arguments alone."""

from __future__ import annotations

import numpy as np
import pytest

from qlora_wgpu.data import Example, bucket_length, collate, epoch_order
from qlora_wgpu.errors import ShapeError


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_an_order_is_a_permutation(n) -> None:
    order = epoch_order(n, seed=0, epoch=0)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))


def test_the_order_follows_from_seed_and_epoch() -> None:
    orders = {(s, e): epoch_order(100, s, e).tolist() for s in range(4) for e in range(4)}
    assert len({tuple(order) for order in orders.values()}) == 16
    np.random.seed(1)
    assert epoch_order(100, 2, 3).tolist() == orders[2, 3]


def test_the_order_is_recorded() -> None:
    """Resumed runs depend on it: it must not change between versions."""
    assert epoch_order(8, seed=0, epoch=0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert epoch_order(8, seed=2**32 - 1, epoch=5).tolist() == [1, 6, 3, 0, 5, 4, 7, 2]


def test_the_first_place_is_fair() -> None:
    first = np.bincount([epoch_order(5, s, 0)[0] for s in range(2000)], minlength=5)
    assert np.all(np.abs(first - 400) < 6 * np.sqrt(2000 * 0.2 * 0.8))


@pytest.mark.parametrize("arguments", [(-1, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_negative_arguments(arguments) -> None:
    with pytest.raises(ShapeError):
        epoch_order(*arguments)


def example(ids, labels) -> Example:
    return Example(np.array(ids, np.int32), np.array(labels, np.int32))


def test_collate() -> None:
    batch = collate([[example([5, 6, 7], [-100, 6, 7])], [example([8], [8])]], 9, 4)
    assert batch.input_ids.tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert batch.labels.tolist() == [[-100, 6, 7, -100], [8, -100, -100, -100]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    for array in (batch.input_ids, batch.labels, batch.attention_mask):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous


def test_collate_packs() -> None:
    one, two = example([5, 6, 7], [-100, 6, 7]), example([8, 9], [8, 9])
    batch = collate([[one, two], []], 0, 6)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 0], [0] * 6]
    assert batch.labels.tolist() == [[-100, 6, 7, 8, 9, -100], [-100] * 6]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 2, 2, 0], [0] * 6]


def test_collate_takes_what_fits() -> None:
    assert collate([[example([5, 6], [5, 6])]], 0, 2).attention_mask.tolist() == [[1, 1]]
    with pytest.raises(ShapeError, match="2 tokens does not fit into a batch of length 1"):
        collate([[example([5, 6], [5, 6])]], 0, 1)
    with pytest.raises(ShapeError, match="at least one"):
        collate([], 0, 1)


def test_buckets() -> None:
    lengths = sorted({bucket_length(n, 1000) for n in range(1, 1001)})
    assert lengths == [32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000]
    for n in range(1, 1001):
        assert n <= bucket_length(n, 1000) <= max(1.5 * n, 32)


@pytest.mark.parametrize(
    ("longest", "limit", "expected"),
    [(1, 16, 16), (16, 16, 16), (32, 64, 32), (33, 64, 48), (49, 60, 60), (64, 64, 64)],
)
def test_buckets_at_the_edges(longest, limit, expected) -> None:
    assert bucket_length(longest, limit) == expected


def test_no_bucket_beyond_the_limit() -> None:
    with pytest.raises(ShapeError):
        bucket_length(65, 64)
