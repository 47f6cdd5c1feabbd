import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded

from qlora_wgpu.ops.columns import columns
from qlora_wgpu.ops.tensor import as_float32


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("kind", DTYPES)
def test_parts_of_a_matrix(device, profile, dtype, kind):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((37, 45))
    parts = [(0, 20), (20, 11), (31, 14)]  # an odd first column, too
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.operand(x, grad=True)
    outputs = [columns(bench.graph, tx, *part) for part in parts]
    dys = [rng.standard_normal((37, count)) for _, count in parts]
    for y, dy in zip(outputs, dys, strict=True):
        bench.graph.add_gradient(y, bench.given(dy, kind))
    bench.graph.backward()
    *got, got_dx = bench.run(*outputs, bench.graph.gradient_of(tx))
    for y, (first, count) in zip(got, parts, strict=True):
        assert_close(y, rounded(x, dtype)[:, first : first + count], 0.0, "copied")
    expected = np.concatenate(dys, axis=1)
    assert_close(got_dx, rounded(expected, kind), 0.0, "copied")


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("parts", [[(3, 7)], [(0, 30), (9, 20), (44, 1)]])
def test_overlapping_parts_add_up(device, profile, dtype, kind, parts):
    """What no part covers gets zero."""
    rng = np.random.default_rng(7)
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.operand(rng.standard_normal((37, 45)), grad=True)
    expected = np.zeros((37, 45))
    for first, count in parts:
        dy = rng.standard_normal((37, count))
        expected[:, first : first + count] += rounded(dy, kind)
        bench.graph.add_gradient(columns(bench.graph, tx, first, count), bench.given(dy, kind))
    bench.graph.backward()
    (got,) = bench.run(bench.graph.gradient_of(tx))
    assert_close(got, expected, 2e-7, "float32 sums")
    writers = [launch.path for launch in bench.graph.launches if "backward" in launch.path]
    assert len(writers) == len(parts), "added in place"


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_as_float32(device, profile, dtype):
    rng = np.random.default_rng(6)
    x = rng.standard_normal((9, 13))
    bench = Bench(device, dtype, PROFILES[profile])
    tx, dy = bench.operand(x, grad=True), bench.given(x)
    y = as_float32(bench.graph, tx)
    assert y.dtype == "float32"
    assert bench.gradients(y, dy, tx) == [dy]  # handed on as it is
    if dtype == "float32":
        assert y is tx
    else:
        (got,) = bench.run(y)
        assert_close(got, rounded(x, dtype), 0.0, "copied")
