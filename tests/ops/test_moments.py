"""Moments in host memory pass through the device in parts."""

from itertools import pairwise

import numpy as np
import pytest

from qlora_wgpu.ops import moments
from qlora_wgpu.ops.moments import (
    BlockTable,
    Span,
    moments_in_parts,
    passing_bytes,
    passing_parts,
    transfer_bytes,
)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    monkeypatch.setattr(moments, "_PART", 64)


@pytest.mark.parametrize(
    ("lengths", "parts", "nbytes"),
    [
        ([40], 1, 40),
        ([64], 1, 64),
        ([65], 2, 2 * 64),
        ([200], 4, 2 * 64),
        ([64, 64, 10], 3, 2 * 64),
        ([30, 20], 2, 2 * 30),
    ],
)
def test_two_parts_are_on_the_device_and_four_on_their_way(lengths, parts, nbytes):
    assert passing_parts(lengths) == parts
    for count in (1, 2):
        assert passing_bytes(lengths, count) == count * 4 * nbytes
        assert transfer_bytes(lengths, count) == 2 * count * 4 * nbytes


def test_parts_are_views_of_the_moments_in_their_order():
    own = [[np.arange(100, dtype=np.float32), np.arange(30, dtype=np.float32)] for _ in range(2)]
    parts = moments_in_parts(own)
    assert [(part.shard, part.blocks.word, part.blocks.end_word) for part in parts] == [
        (0, 0, 64), (0, 64, 100), (1, 100, 130),
    ]  # fmt: skip
    assert [part.moments[0].columns for part in parts] == [64, 36, 30]
    for moment in range(2):
        kept = [part.kept[moment] for part in parts]
        assert all(each.lasts and each.nbytes == each.data.nbytes for each in kept)
        values = [each.data.view(np.float32) for each in kept]
        for value, start, source in zip(values, (0, 64, 0), (0, 0, 1), strict=True):
            assert np.shares_memory(value, own[moment][source])
            assert value[0] == start
    # Two buffers of each moment take turns.
    storages = [part.moments[0].storage for part in parts]
    assert storages[0] is storages[2] is not storages[1]
    assert parts[0].moments[1].storage is not storages[0]
    assert {each.nbytes for each in storages} == {4 * 64}


def table(*sizes, cuts=()):
    """Tensors of these numbers of elements, one after another in the flat vector."""
    spans, offset = [], 0
    for size in sizes:
        spans.append(Span(offset, 1, size, size))
        offset += size
    return BlockTable(spans, [np.zeros(2, np.float32)], cuts)


def test_large_tensors_have_codes_and_small_ones_numbers():
    made = table(4096, 4095, 300)
    _, small, last = made.tensors
    assert [t.in_codes for t in made.tensors] == [True, False, False]
    assert [(t.blocks, t.block_words) for t in made.tensors] == [(16, 65), (16, 256), (2, 256)]
    assert [(t.first_block, t.first_word) for t in (small, last)] == [(16, 1040), (32, 1040 + 4096)]
    assert (made.blocks, made.words) == (34, 1040 + 4096 + 512)
    rows = np.asarray(made.table.storage.data)[2:].reshape(3, 8)
    assert rows[1].tolist() == [16, 1040, 4096, 4095, 4095, 4095, 256, 0]


def test_shards_begin_with_tensors():
    made = table(4096, 512, 256, cuts=(4096, 4608))
    ends = [0, 1040, 1040 + 512, 1040 + 768]
    assert [(s.word, s.end_word) for s in made.shards] == [*pairwise(ends)]
    assert [(s.block, s.end) for s in made.shards] == [(0, 16), (16, 18), (18, 19)]
    beyond = table(4096, 512, cuts=(4096, 9999))
    assert [(s.word, s.end_word) for s in beyond.shards] == [(0, 1040), (1040, 1552), (1552, 1552)]


@pytest.mark.parametrize(
    ("most", "cuts"),
    [
        (2000, [(0, 0), (18, 1552)]),
        (1552, [(0, 0), (18, 1552)]),
        (1551, [(0, 0), (17, 1296), (18, 1552)]),
        (1040, [(0, 0), (16, 1040), (18, 1552)]),
        (650, [(0, 0), (10, 650), (17, 1296), (18, 1552)]),
    ],
)
def test_parts_have_whole_blocks(most, cuts):
    made = table(4096, 512)
    (shard,) = made.shards
    assert made.cuts(shard, most) == cuts


def test_parts_of_a_shard_have_its_tensors_alone():
    made = table(4096, 512, 512, cuts=(4096,))
    assert made.cuts(made.shards[1], 512) == [(16, 1040), (18, 1552), (20, 2064)]
    assert made.cuts(made.shards[0], 4096) == [(0, 0), (16, 1040)]
