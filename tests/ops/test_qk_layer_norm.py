import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.ops.pointwise import qk_layer_norm
from qlora_wgpu.reference import norms as reference
from qlora_wgpu.reference.tape import grad

EPS = 0.3  # so much that it counts beside variances of order 1


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(37, 6, 20), (1, 3, 6), (5, 2, 64)])
@pytest.mark.parametrize("dy_dtype", DTYPES)
@pytest.mark.parametrize("shared", [False, True])
def test_qk_layer_norm(device, profile, dtype, rows, heads, head_dim, dy_dtype, shared):
    rng = np.random.default_rng(3)
    x, dy = 3 * rng.standard_normal((2, rows, heads * head_dim)) + 1
    weight, bias = rng.standard_normal((2, 1 if shared else heads, head_dim))
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.operand(x, grad=True)
    added = bench.given(bias) if shared else None
    y = qk_layer_norm(bench.graph, tx, bench.given(weight), EPS, added)
    got_y, got_dx = bench.run(y, *bench.gradients(y, bench.given(dy, dy_dtype), tx))
    x, dy, weight = rounded(x, dtype), rounded(dy, dy_dtype), rounded(weight, "float32")
    bound, why = tolerance(dtype, head_dim), "sums over a head, one rounding"
    bias = rounded(bias, "float32") if shared else None
    assert_close(got_y, reference.qk_layer_norm(x, weight, EPS, bias), bound, why)
    assert_close(got_dx, grad(reference.qk_layer_norm, dy, x, weight, EPS), bound, why)
