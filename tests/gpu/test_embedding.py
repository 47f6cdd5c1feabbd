import numpy as np
import pytest

from gpu.harness import PROFILES, VARIANTS, Bench, rounded
from qlora_wgpu.ops.embedding import embedding
from qlora_wgpu.ops.modules import DenseMatrix


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("shard", [83, 24])
def test_embedding(device, profile, dtype, shard):
    rng = np.random.default_rng(11)
    weight = rng.standard_normal((83, 20))
    ids = np.concatenate([[0, 82, 23, 24], rng.integers(0, 83, 33)])
    bench = Bench(device, dtype, PROFILES[profile])
    pieces = tuple((i, bench.operand(weight[i : i + shard])) for i in range(0, 83, shard))
    y = embedding(bench.graph, DenseMatrix(83, 20, pieces), bench.batch(1, 37, ids=ids))
    (got,) = bench.run(y)
    assert np.array_equal(got, rounded(weight, dtype)[ids])
