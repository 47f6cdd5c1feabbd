import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.ops.qk_layer_norm import qk_layer_norm
from qlora_wgpu.reference import qk_layer_norm as reference


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 3, 6), (37, 6, 20), (5, 2, 64)])
@pytest.mark.parametrize("dy_dtype", DTYPES)
@pytest.mark.parametrize("shared", [False, True])
def test_qk_layer_norm(device, profile, dtype, rows, heads, head_dim, dy_dtype, shared):
    rng = np.random.default_rng(3)
    x, dy = 3 * rng.standard_normal((2, rows, heads * head_dim)) + 1
    weight, bias = rng.standard_normal((2, 1 if shared else heads, head_dim))
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.operand(x, grad=True)
    added = bench.given(bias) if shared else None
    y = qk_layer_norm(bench.graph, tx, bench.given(weight), 1e-5, added)
    got_y, got_dx = bench.run(y, *bench.gradients(y, bench.given(dy, dy_dtype), tx))
    x, dy, weight = rounded(x, dtype), rounded(dy, dy_dtype), rounded(weight, "float32")
    bound, why = tolerance(dtype, head_dim), "sums over a head, one rounding"
    bias = rounded(bias, "float32") if shared else None
    assert_close(got_y, reference.forward(x, weight, 1e-5, bias), bound, why)
    assert_close(got_dx, reference.backward(dy, x, weight, 1e-5), bound, why)


@pytest.mark.parametrize("profile", PROFILES)
def test_eps_counts_where_a_head_hardly_varies(device, profile):
    rng = np.random.default_rng(4)
    x, dy, weight = 1e-3 * rng.standard_normal((5, 12)), *rng.standard_normal((2, 5, 12))
    weight = weight[:2, :6]
    bench = Bench(device, "float32", PROFILES[profile])
    tx = bench.given(x, grad=True)
    y = qk_layer_norm(bench.graph, tx, bench.given(weight), 1e-5)
    got_y, got_dx = bench.run(y, *bench.gradients(y, bench.given(dy), tx))
    x, dy, weight = (rounded(a, "float32") for a in (x, dy, weight))
    bound = tolerance("float32", 6)
    assert_close(got_y, reference.forward(x, weight, 1e-5), bound, "sums over a head")
    assert_close(got_dx, reference.backward(dy, x, weight, 1e-5), bound, "sums over a head")
