import numpy as np
import pytest

from gpu.harness import PROFILES, VARIANTS, Bench, assert_close, rounded
from qlora_wgpu.ops.columns import columns
from qlora_wgpu.ops.tensor import as_float32


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("kind", ["operand", "float32"])
def test_parts_of_a_matrix(device, profile, dtype, kind):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((37, 45))
    parts = [(0, 20), (20, 11), (31, 14)]  # an odd first column, too
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.operand(x, grad=True)
    outputs = [columns(bench.graph, tx, *part) for part in parts]
    dys = [rng.standard_normal((37, count)) for _, count in parts]
    for y, dy in zip(outputs, dys, strict=True):
        bench.graph.add_gradient(y, bench.operand(dy) if kind == "operand" else bench.given(dy))
    bench.graph.backward()
    dx, again = bench.graph.gradient_into(tx)
    assert again
    *got, got_dx = bench.run(*outputs, dx)
    for y, (first, count) in zip(got, parts, strict=True):
        assert_close(y, rounded(x, dtype)[:, first : first + count], 0.0, "copied")
    wanted = np.concatenate(dys, axis=1)
    assert_close(got_dx, rounded(wanted, dtype if kind == "operand" else "float32"), 0.0, "copied")


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_as_float32(device, profile, dtype):
    rng = np.random.default_rng(6)
    x = rng.standard_normal((9, 13))
    bench = Bench(device, dtype, PROFILES[profile])
    tx, dy = bench.operand(x, grad=True), bench.given(x)
    y = as_float32(bench.graph, tx)
    assert y.dtype == "float32"
    assert bench.gradients(y, dy, tx) == [dy]  # handed on as it is
    (got,) = bench.run(y)
    assert_close(got, rounded(x, dtype), 0.0, "copied")
