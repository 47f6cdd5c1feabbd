import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.ops.tensor import as_operand, fill_zero, softcap_in_place


def test_cast_rounds_to_nearest_even(device):
    # Every tie there is between two neighbours, both signs, then random bits of finite numbers.
    ties = (np.arange(0x3F00, 0x4100, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    some = np.random.default_rng(14).standard_normal(300).astype(np.float32)
    x = np.concatenate([ties, -ties, ties + np.spacing(ties), some]).reshape(-1, 12)
    bench = Bench(device, "bfloat16", PROFILES["cpu"])
    (got,) = bench.run(as_operand(bench.graph, bench.given(x)))
    assert np.array_equal(got, rounded(x, "bfloat16"))


def test_float32_operands_are_not_copied(device):
    bench = Bench(device, "float32", PROFILES["cpu"])
    x = bench.given(np.ones((2, 3)))
    assert as_operand(bench.graph, x) is x


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("kind", DTYPES)
def test_fill_and_add(device, profile, dtype, kind):
    rng = np.random.default_rng(15)
    x, y = (rng.standard_normal((37, 20)) for _ in range(2))
    bench = Bench(device, dtype, PROFILES[profile])
    g = bench.graph
    tensor, cleared = bench.operand(x, grad=True), bench.given(x, kind)
    g.add_gradient(tensor, bench.given(x))
    g.add_gradient(tensor, bench.given(y, kind))
    fill_zero(g, cleared)
    total, zeros = bench.run(g.gradient_of(tensor), cleared)
    expected = np.float32(rounded(x, "float32")) + np.float32(rounded(y, kind))
    assert np.array_equal(total, expected.astype(np.float64))
    assert not zeros.any()


@pytest.mark.parametrize("profile", list(PROFILES))
def test_softcap(device, profile):
    x = np.linspace(-90, 90, 37 * 20).reshape(37, 20)
    bench = Bench(device, "bfloat16", PROFILES[profile])
    y = bench.given(x)
    softcap_in_place(bench.graph, y, 30.0)
    (got,) = bench.run(y)
    expected = 30 * np.tanh(rounded(x, "float32") / 30)
    assert_close(got, expected, tolerance("float32"), "exp is good to 1e-6")
