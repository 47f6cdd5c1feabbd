import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.ops.pointwise import scaled, weighted_sum
from qlora_wgpu.reference import pointwise as reference

WHY = "one product, one rounding"


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("kind", DTYPES)
def test_scaled(device, profile, dtype, kind):
    rng = np.random.default_rng(3)
    x, dy = rng.standard_normal((2, 37, 21))
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.given(x, kind, grad=True)
    y = scaled(bench.graph, tx, bench.given(np.array([-0.37])))
    assert y.dtype == kind
    got_y, got_dx = bench.run(y, *bench.gradients(y, bench.given(dy, dtype), tx))
    scalar = float(np.float32(-0.37))
    assert_close(got_y, reference.scaled(rounded(x, kind), scalar), tolerance(kind), WHY)
    assert_close(got_dx, reference.scaled(rounded(dy, dtype), scalar), tolerance(kind), WHY)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("kind", DTYPES)
def test_weighted_sum(device, profile, dtype, kind):
    rng = np.random.default_rng(4)
    x, z, dy = rng.standard_normal((3, 37, 21))
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.operand(x, grad=True)
    y = weighted_sum(bench.graph, tx, bench.given(z, kind), 0.7, -3.0)
    got_y, got_dx = bench.run(y, *bench.gradients(y, bench.given(dy), tx))
    exact = reference.weighted_sum(rounded(x, dtype), rounded(z, kind), 0.7, -3.0)
    assert_close(got_y, exact, tolerance(dtype), WHY)
    assert_close(got_dx, reference.scaled(rounded(dy, "float32"), 0.7), tolerance(dtype), WHY)
