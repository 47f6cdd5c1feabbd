import numpy as np
import pytest
from support.harness import PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.ops.pointwise import XIELUScalars, xielu
from qlora_wgpu.reference import pointwise as reference
from qlora_wgpu.reference.tape import grad

SCALARS = (0.7, -0.4, 0.45, -0.03)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_xielu(device, profile, dtype):
    rng = np.random.default_rng(3)
    x, dy = 2 * rng.standard_normal((37, 52)), rng.standard_normal((37, 52))
    x.flat[:8] = [-90.0, 90.0, 0.0, -0.01, -0.04, -0.69, -0.71, 1e-5]  # where two forms meet
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.operand(x, grad=True)
    y = xielu(bench.graph, tx, XIELUScalars(*(bench.given(np.array([s])) for s in SCALARS)))
    got_y, got_dx = bench.run(y, *bench.gradients(y, bench.given(dy), tx))
    x, dy = rounded(x, dtype), rounded(dy, "float32")
    why = "exp is good to 1e-6, one rounding"
    assert_close(got_y, reference.xielu(x, SCALARS), tolerance(dtype), why)
    assert_close(got_dx, grad(reference.xielu, dy, x, SCALARS), tolerance(dtype), why)


def test_nothing_is_lost_near_zero(device):
    """exp(x) - 1 - x is of the size of x², and the slope of x."""
    x = -np.geomspace(1e-4, 1.0, 40)[None]
    scalars = (0.7, 30.0, 0.0, -1e-6)  # without the slope at zero, which hides it
    bench = Bench(device, "float32", PROFILES["cpu"])
    tx = bench.given(x, grad=True)
    y = xielu(bench.graph, tx, XIELUScalars(*(bench.given(np.array([s])) for s in scalars)))
    got_y, got_dx = bench.run(y, *bench.gradients(y, bench.given(np.ones_like(x)), tx))
    x = rounded(x, "float32")
    assert np.abs(got_y / reference.xielu(x, scalars) - 1).max() <= 2e-6
    assert np.abs(got_dx / grad(reference.xielu, 1.0, x, scalars) - 1).max() <= 2e-6
