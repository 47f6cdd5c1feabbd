"""Moments in host memory pass through the device in parts."""

import numpy as np
import pytest

from qlora_wgpu.ops import moments
from qlora_wgpu.ops.moments import (
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
