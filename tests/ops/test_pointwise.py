import numpy as np
from support.harness import PROFILES, Bench, assert_checked, rounded

from qlora_wgpu.ops.pointwise import ClampedGLU, XIELUScalars, clamped_glu, xielu
from qlora_wgpu.reference import pointwise as reference
from qlora_wgpu.reference.tape import grad
from qlora_wgpu.selfcheck.cases.common import arguments_of
from qlora_wgpu.selfcheck.cases.pointwise import check_activation


def test_nan_stays_nan_beside_a_clamp(device):
    bench = Bench(device, "float32", PROFILES["cpu"])
    values = np.array([[np.nan, 1.0, 1.0, np.nan]])
    tg, tu = bench.operand(values, grad=True), bench.operand(values[:, ::-1], grad=True)
    y = clamped_glu(bench.graph, tg, tu, ClampedGLU())
    for got in bench.run(y, *bench.gradients(y, bench.given(np.ones((1, 4))), tg, tu)):
        assert np.isnan(got[0, [0, 3]]).any() and np.isfinite(got[0, 1:3]).all()


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


def test_every_activation_in_turn(device):
    """Of the kinds of kernels, those that are compiled in no time."""
    for arguments in arguments_of(check_activation):
        assert_checked(device, "cpu", "bfloat16", check_activation, *arguments)
