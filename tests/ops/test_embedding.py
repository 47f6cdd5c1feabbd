from dataclasses import replace

import numpy as np
import pytest
from support.harness import PROFILES, VARIANTS, Bench, assert_checked, rounded

from qlora_wgpu.ops.lora_ends import embedding
from qlora_wgpu.ops.modules import DenseMatrix
from qlora_wgpu.selfcheck.cases.common import arguments_of
from qlora_wgpu.selfcheck.cases.loss import check_embedding


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("shard", [83, 24])
def test_embedding(device, profile, dtype, shard):
    rng = np.random.default_rng(11)
    weight = rng.standard_normal((83, 20))
    ids = np.concatenate([[0, 82, 23, 24], rng.integers(0, 83, 33)])
    bench = Bench(device, dtype, PROFILES[profile])
    pieces = tuple((i, bench.operand(weight[i : i + shard])) for i in range(0, 83, shard))
    y = embedding(bench.graph, DenseMatrix(83, 20, pieces), bench.batch_of(1, 37, ids=ids))
    (got,) = bench.run(y)
    assert np.array_equal(got, rounded(weight, dtype)[ids])


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_noise(device, profile, dtype):
    """NEFTune: uniform in ±α/√(seq · hidden), in training batches only, one draw per element."""
    rng = np.random.default_rng(11)
    weight, ids = rng.standard_normal((83, 50)), rng.integers(0, 83, 240)
    noises = []
    for key in (5, 5, 6, None):
        bench = Bench(device, dtype, PROFILES[profile])
        pieces = tuple((i, bench.operand(weight[i : i + 48])) for i in range(0, 83, 48))
        batch = replace(bench.batch_of(2, 120, ids=ids, dropout_key=key), noise=5.0)
        (got,) = bench.run(embedding(bench.graph, DenseMatrix(83, 50, pieces), batch, 2.0))
        noises.append(got - 2 * rounded(weight, dtype)[ids])
    one, again, other, none = noises
    assert np.array_equal(one, again) and not none.any()
    most = 5 / np.sqrt(120 * 50)
    for noise in (one, other):
        assert 0.99 * most < np.abs(noise).max() <= most * (1 + 1e-6)
        assert abs(noise.mean()) < 0.02 * most
        assert abs(noise.std() - most / np.sqrt(3)) < 0.01 * most
    assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02


@pytest.mark.quick("values")
@pytest.mark.parametrize("arguments", arguments_of(check_embedding))
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_rows_of_two_shards_and_their_noise_are_the_references(device, profile, dtype, arguments):
    assert_checked(device, profile, dtype, check_embedding, *arguments)
