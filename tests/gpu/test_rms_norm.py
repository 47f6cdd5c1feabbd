import numpy as np
import pytest

from gpu.harness import PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance
from qlora_wgpu.ops.rms_norm import rms_norm
from qlora_wgpu.reference import rms_norm as reference


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("shape", [(1, 5), (3, 12), (37, 130), (9, 72)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_rms_norm(device, profile, dtype, shape, accumulate):
    rng = np.random.default_rng(1)
    x, dy = 3 * rng.standard_normal(shape), rng.standard_normal(shape)
    weight, before = rng.standard_normal(shape[1]), rng.standard_normal(shape)
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.given(x, grad=True)
    y = rms_norm(bench.graph, tx, bench.given(weight), 1e-5)
    if accumulate:
        bench.graph.hand_over(tx, bench.given(before))
    (dx,) = bench.gradients(y, bench.given(dy), tx)
    got_y, got_dx = bench.run(y, dx)
    x, dy, weight = (rounded(a, "float32") for a in (x, dy, weight))
    assert_close(got_y, reference.forward(x, weight, 1e-5), tolerance(dtype), "one rounding of y")
    expected = reference.backward(dy, x, weight, 1e-5) + (before if accumulate else 0)
    assert_close(got_dx, expected, tolerance("float32", shape[1]), "sums over a row")
