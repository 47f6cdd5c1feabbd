"""Elements within bounds; gradients pass by the very values that the kernel has read."""

import numpy as np
import pytest
from support.harness import PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.ops.pointwise import clip
from qlora_wgpu.reference import pointwise as reference
from qlora_wgpu.reference.tape import grad

LIMIT = 0.6


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_clip(device, profile, dtype):
    rng = np.random.default_rng(4)
    x, dy = rng.standard_normal((37, 52)), rng.standard_normal((37, 52))
    near = np.linspace(0.99, 1.01, 26) * LIMIT  # bfloat16 has five numbers in it
    x[0], x[1] = np.concatenate([near, -near]), np.tile([LIMIT, -LIMIT, 0.0, 90.0], 13)
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.operand(x, grad=True)
    y = clip(bench.graph, tx, LIMIT)
    got_y, got_dx = bench.run(y, *bench.gradients(y, bench.given(dy), tx))
    x, dy = rounded(x, dtype), rounded(dy, "float32")
    limit = float(np.float32(LIMIT))
    why = "nothing but the rounding of what is written"
    assert_close(got_y, reference.clip(x, limit), tolerance(dtype), why)
    expected = grad(reference.clip, dy, x, limit)
    assert np.array_equal(got_dx == 0, expected == 0)  # the same elements, however near the limit
    assert_close(got_dx, expected, tolerance(dtype), why)
