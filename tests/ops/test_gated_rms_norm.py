import numpy as np
import pytest
from support.harness import PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.ops.pointwise import gated_rms_norm
from qlora_wgpu.reference import norms as reference
from qlora_wgpu.reference.tape import grads

EPS = 0.3  # so much that it counts beside squares of numbers of order 1


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(37, 3, 24), (1, 1, 8), (5, 2, 128)])
def test_gated_rms_norm(device, profile, dtype, rows, heads, head_dim):
    rng = np.random.default_rng(3)
    x, z, dy = rng.standard_normal((3, rows, heads * head_dim))
    z.flat[:4] = -90.0, 90.0, 0.0, -0.0
    weight = rng.standard_normal(head_dim)
    bench = Bench(device, dtype, PROFILES[profile])
    tx, tz = bench.operand(x, grad=True), bench.operand(z, grad=True)
    y = gated_rms_norm(bench.graph, tx, tz, bench.given(weight), EPS)
    got_y, got_dx, got_dz = bench.run(y, *bench.gradients(y, bench.given(dy), tx, tz))
    x, z = rounded(x, dtype), rounded(z, dtype)
    dy, weight = rounded(dy, "float32"), rounded(weight, "float32")
    bound, why = tolerance(dtype, head_dim), "sums over a head, one rounding"
    dx, dz = grads(reference.gated_rms_norm, dy, x, z, weight, EPS, of=2)
    assert_close(got_y, reference.gated_rms_norm(x, z, weight, EPS), bound, why)
    assert_close(got_dx, dx, bound, why)
    assert_close(got_dz, dz, bound, why)
