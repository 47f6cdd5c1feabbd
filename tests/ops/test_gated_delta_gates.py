import numpy as np
import pytest
from support.harness import PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.ops.delta_net import gated_delta_gates
from qlora_wgpu.reference import delta_net as reference
from qlora_wgpu.reference.tape import grads

ROWS = 21


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("heads", [5, 14])
def test_gated_delta_gates(device, profile, dtype, heads):
    rng = np.random.default_rng(3)
    a, b, ddecay, dbeta = 3 * rng.standard_normal((4, ROWS, heads))
    a.flat[:6] = b.flat[:6] = -80.0, 80.0, 0.0, -0.0, -16.0, 16.0
    a_log, dt_bias = np.log(np.linspace(0.01, 16, heads)), rng.standard_normal(heads)
    bench = Bench(device, dtype, PROFILES[profile])
    ta, tb = bench.operand(a, grad=True), bench.operand(b, grad=True)
    decay, beta = gated_delta_gates(bench.graph, ta, tb, bench.given(a_log), bench.given(dt_bias))
    bench.graph.add_gradient(decay, bench.given(ddecay))
    got = bench.run(decay, beta, *bench.gradients(beta, bench.given(dbeta), ta, tb))
    a, b = rounded(a, dtype), rounded(b, dtype)
    a_log, dt_bias, ddecay, dbeta = (rounded(x, "float32") for x in (a_log, dt_bias, ddecay, dbeta))
    exact_decay, exact_beta = reference.gated_delta_gates(a, b, a_log, dt_bias)
    assert_close(got[1], exact_beta, tolerance("float32"), "exp is good to 1e-6")
    # exp is good to |x| ulp of float32, at x = -80; a small decay counts over many tokens.
    error = np.abs(got[0] / exact_decay - 1)
    assert error.max() <= 1e-5, "each decay by itself"
    why = "exp is good to 1e-6, one rounding"
    for actual, expected in zip(
        got[2:],
        grads(reference.gated_delta_gates, (ddecay, dbeta), a, b, a_log, dt_bias, of=2),
        strict=True,
    ):
        assert_close(actual, expected, tolerance(dtype), why)
