import numpy as np
import pytest
from support.harness import (
    PROFILES,
    VARIANTS,
    Bench,
    assert_checked,
    assert_close,
    rounded,
    tolerance,
)

from qlora_wgpu.ops.norms import layer_norm, rms_norm
from qlora_wgpu.reference import norms as reference
from qlora_wgpu.reference.tape import grad
from qlora_wgpu.selfcheck.cases.norms import check_only_norm

EPS = 0.3  # so much that it counts beside squares of numbers of order 1


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("shape", [(37, 130), (1, 5), (3, 12), (9, 72)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_rms_norm(device, profile, dtype, shape, accumulate):
    rng = np.random.default_rng(1)
    x, dy = 3 * rng.standard_normal(shape), rng.standard_normal(shape)
    weight, before = rng.standard_normal(shape[1]), rng.standard_normal(shape)
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.given(x, grad=True)
    y = rms_norm(bench.graph, tx, bench.given(weight), EPS)
    if accumulate:
        bench.graph.add_gradient(tx, bench.given(before))
    (dx,) = bench.gradients(y, bench.given(dy), tx)
    got_y, got_dx = bench.run(y, dx)
    x, dy, weight = (rounded(a, "float32") for a in (x, dy, weight))
    assert_close(got_y, reference.rms_norm(x, weight, EPS), tolerance(dtype), "one rounding of y")
    expected = grad(reference.rms_norm, dy, x, weight, EPS) + (before if accumulate else 0)
    assert_close(got_dx, expected, tolerance("float32", shape[1]), "sums over a row")


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_a_residual_is_added_in_float32(device, profile, dtype):
    rng = np.random.default_rng(2)
    x, dy, skip = (rng.standard_normal((37, 20)) for _ in range(3))
    weight = rng.standard_normal(20)
    bench = Bench(device, dtype, PROFILES[profile])
    tx, tskip = bench.given(x, grad=True), bench.given(skip, grad=True)
    y = rms_norm(bench.graph, tx, bench.given(weight), EPS, tskip)
    assert y.dtype == "float32"
    got = bench.run(y, *bench.gradients(y, bench.given(dy), tx, tskip))
    x, dy, skip, weight = (rounded(a, "float32") for a in (x, dy, skip, weight))
    expected = reference.rms_norm(x, weight, EPS) + skip
    assert_close(got[0], expected, tolerance("float32", 20), "sums over a row")
    assert_close(got[1], grad(reference.rms_norm, dy, x, weight, EPS), 4e-6, "sums over a row")
    assert_close(got[2], dy, 0.0, "handed on")


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_what_is_made_again_has_the_same_bits(device, profile, dtype):
    bench = assert_checked(device, profile, dtype, check_only_norm)
    assert "rms_norm/again.wgsl" in bench.shaders


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("shape", [(37, 130), (1, 5), (3, 12), (9, 72)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_layer_norm(device, profile, dtype, shape, with_bias, accumulate):
    rng = np.random.default_rng(1)
    x, dy = 3 * rng.standard_normal(shape) + 1, rng.standard_normal(shape)
    weight, before = rng.standard_normal(shape[1]), rng.standard_normal(shape)
    bias = rng.standard_normal(shape[1]) * with_bias
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.given(x, grad=True)
    tbias = bench.given(bias) if with_bias else None
    y = layer_norm(bench.graph, tx, bench.given(weight), tbias, EPS)
    if accumulate:
        bench.graph.add_gradient(tx, bench.given(before))
    (dx,) = bench.gradients(y, bench.given(dy), tx)
    got_y, got_dx = bench.run(y, dx)
    x, dy, weight, bias = (rounded(a, "float32") for a in (x, dy, weight, bias))
    expected = reference.layer_norm(x, weight, EPS, bias)
    assert_close(got_y, expected, tolerance(dtype, shape[1]), "one rounding of y")
    expected = grad(reference.layer_norm, dy, x, weight, EPS) + (before if accumulate else 0)
    assert_close(got_dx, expected, tolerance("float32", shape[1]), "sums over a row")
