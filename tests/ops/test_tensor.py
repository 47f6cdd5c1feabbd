import numpy as np
import pytest
from support.harness import (
    DTYPES,
    PROFILES,
    VARIANTS,
    Bench,
    assert_checked,
    assert_close,
    rounded,
    tolerance,
)

from qlora_wgpu.graph.tensor import Storage, matrix, vector
from qlora_wgpu.kernels.common import sum_parts
from qlora_wgpu.ops.tensor import (
    as_operand,
    fill_zero,
    in_words,
    one_below_the_other,
    softcap_in_place,
)
from qlora_wgpu.selfcheck.cases.optimizers import check_rounded_sums


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


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("accumulate", [False, True])
def test_parts_are_added_up(device, profile, parts, accumulate):
    rng = np.random.default_rng(16)
    x, y, bias = (rng.standard_normal((n, 20)) for n in (parts * 7, 7, 1))
    bench = Bench(device, "float32", PROFILES[profile])
    out = bench.given(y) if accumulate else bench.output(7, 20)
    given = None if accumulate else bench.given(bias[0])
    sum_parts(bench.graph, bench.given(x), out, parts, accumulate=accumulate, bias=given)
    (got,) = bench.run(out)
    expected = x.reshape(parts, 7, 20).sum(0) + (y if accumulate else bias)
    assert_close(got, expected, tolerance("float32", parts), "a few terms of order 1")


@pytest.mark.parametrize("profile", PROFILES)
def test_a_part_of_a_gradient_is_rounded_once_and_its_neighbours_stay(device, profile):
    assert_checked(device, profile, "bfloat16", check_rounded_sums)


PLACE = Storage("place", "base", 4096)


def at(offset, rows=2, storage=PLACE):
    return matrix("x", rows, 8, "float32", storage, offset)


def test_adjacent_matrices_are_one():
    whole = one_below_the_other([at(64), at(128, 3), at(224)])
    assert (whole.offset, whole.rows, whole.columns) == (64, 7, 8)
    assert one_below_the_other([at(64)]).rows == 2
    other = Storage("other", "base", 4096)
    for apart in ([at(64), at(160)], [at(128), at(64)], [at(64), at(128, storage=other)]):
        assert one_below_the_other(apart) is None


def test_pairs_of_bfloat16_are_words():
    words = in_words(vector("v", 12, "bfloat16", PLACE, 8))
    assert (words.columns, words.stride, words.dtype, words.offset) == (6, 6, "uint32", 8)
