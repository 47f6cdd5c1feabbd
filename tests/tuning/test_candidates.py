"""Whatever a tuner may choose computes the same."""

import pytest
from ops import test_attention, test_cross_entropy, test_linear
from support.harness import DTYPES, PROFILES

from qlora_wgpu.selfcheck.cases.linear import Sizes
from qlora_wgpu.tuning.tuner import candidates

TRIED = [(name, i, p) for name, base in PROFILES.items() for i, p in enumerate(candidates(base))]


@pytest.mark.slow
@pytest.mark.cover("values", base=["gpu"], index=[0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("base", "index", "profile"), TRIED, ids=[f"{n}-{i}" for n, i, _ in TRIED])
def test_candidates_compute_the_same(device, monkeypatch, base, index, profile, dtype):
    monkeypatch.setitem(PROFILES, "tried", profile)
    sizes = Sizes(37, 72, 100, 5, shard=100)
    test_linear.check(device, "tried", dtype, sizes, bias=True, output="residual")
    test_attention.check(device, "tried", dtype, 4, 2, 24, test_attention.PADDED)
    test_cross_entropy.run(device, profile, dtype, 37, 331, 20, 0.7)
