import numpy as np
import pytest

from gpu.harness import PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance
from qlora_wgpu.ops.glu import glu
from qlora_wgpu.reference import glu as reference


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("shape", [(1, 5), (37, 52)])
def test_glu(device, profile, dtype, activation, shape):
    rng = np.random.default_rng(3)
    gate, up, dy = (4 * rng.standard_normal(shape) for _ in range(3))
    gate.flat[:4] = [-90.0, 90.0, 0.0, -0.0]  # where a careless exp overflows
    bench = Bench(device, dtype, PROFILES[profile])
    tg, tu = bench.operand(gate, grad=True), bench.operand(up, grad=True)
    y = glu(bench.graph, tg, tu, activation)
    outputs = bench.gradients(y, bench.given(dy), tg, tu)
    got_y, got_dgate, got_dup = bench.run(y, *outputs)
    gate, up, dy = rounded(gate, dtype), rounded(up, dtype), rounded(dy, "float32")
    expected = reference.backward(dy, gate, up, activation)
    why = "exp is good to 1e-6, one rounding"
    assert_close(got_y, reference.forward(gate, up, activation), tolerance(dtype), why)
    assert_close(got_dgate, expected[0], tolerance(dtype), why)
    assert_close(got_dup, expected[1], tolerance(dtype), why)
