"""Keys and values of new tokens, kept behind those of their own texts."""

import numpy as np
import pytest
from support.harness import PROFILES, VARIANTS, Bench, rounded

from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.ops.attention import append
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.selfcheck.cases import new_tokens as cases
from qlora_wgpu.selfcheck.cases.common import arguments_of

CAPACITY, COLUMNS = 3, 24


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_a_text_that_is_full_writes_into_no_other(device, profile, dtype):
    """Three texts in other places than their rows'; of one there is no room for another token."""
    places, past = np.array([[1], [0], [2]]), np.array([[1], [CAPACITY], [CAPACITY - 1]])
    new = np.random.default_rng(3).standard_normal((2, 3, COLUMNS))
    bench = Bench(device, dtype, PROFILES[profile])
    batch = make_batch_buffers(3, 1, CacheView(KVCache(CAPACITY, 3)))
    ids = np.zeros((3, 1), np.int64)
    batch.storage.data = encode_batch(batch, ids, ids + 1, past=past, places=places)
    k, v = map(bench.operand, new)
    layer = tuple(bench.operand(np.full((3 * CAPACITY, COLUMNS), 0.5)) for _ in range(2))
    append(bench.graph, (k, v), layer, batch)
    for got, rows in zip(bench.run(*layer), new, strict=True):
        expected = np.full((3 * CAPACITY, COLUMNS), 0.5)
        expected[[1 * CAPACITY + 1, 3 * CAPACITY - 1]] = rounded(rows, dtype)[[0, 2]]
        assert np.array_equal(got, expected)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("arguments", arguments_of(cases.check_copied_sequence))
def test_sequences_are_copied(device, profile, dtype, arguments):
    bench = Bench(device, dtype, PROFILES[profile])
    cases.check_copied_sequence(bench, *arguments)
    assert bench.excess <= 1.0
