import numpy as np
import pytest
from support.harness import PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.ops.pointwise import ClampedGLU, clamped_glu
from qlora_wgpu.reference import pointwise as reference
from qlora_wgpu.reference.tape import grads


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("shape", [(1, 5), (37, 52)])
def test_clamped_glu(device, profile, dtype, shape):
    rng = np.random.default_rng(3)
    gate, up, dy = (6 * rng.standard_normal(shape) for _ in range(3))
    gate.flat[:5] = [-90.0, 90.0, 0.0, -0.0, 7.0]  # where a careless exp overflows, and a limit
    bench = Bench(device, dtype, PROFILES[profile])
    tg, tu = bench.operand(gate, grad=True), bench.operand(up, grad=True)
    y = clamped_glu(bench.graph, tg, tu, ClampedGLU())
    got = bench.run(y, *bench.gradients(y, bench.given(dy), tg, tu))
    gate, up, dy = rounded(gate, dtype), rounded(up, dtype), rounded(dy, "float32")
    expected = [
        reference.clamped_glu(gate, up, 7.0, 1.702),
        *grads(reference.clamped_glu, dy, gate, up, 7.0, 1.702, of=2),
    ]
    for value, exact in zip(got, expected, strict=True):
        assert_close(value, exact, tolerance(dtype), "exp is good to 1e-6, one rounding")


def test_nan_stays_nan(device):
    bench = Bench(device, "float32", PROFILES["cpu"])
    values = np.array([[np.nan, 1.0, 1.0, np.nan]])
    tg, tu = bench.operand(values, grad=True), bench.operand(values[:, ::-1], grad=True)
    y = clamped_glu(bench.graph, tg, tu, ClampedGLU())
    for got in bench.run(y, *bench.gradients(y, bench.given(np.ones((1, 4))), tg, tu)):
        assert np.isnan(got[0, [0, 3]]).any() and np.isfinite(got[0, 1:3]).all()
