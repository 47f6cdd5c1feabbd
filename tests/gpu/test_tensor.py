import numpy as np

from gpu.harness import PROFILES, Bench, rounded
from qlora_wgpu.ops.tensor import add_into, as_operand, fill_zero


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


def test_fill_and_add(device):
    rng = np.random.default_rng(15)
    x, y = (rng.standard_normal((37, 20)).astype(np.float32) for _ in range(2))
    bench = Bench(device, "float32", PROFILES["cpu"])
    ty, cleared = bench.given(y), bench.given(x)
    add_into(bench.graph, bench.given(x), ty)
    fill_zero(bench.graph, cleared)
    total, zeros = bench.run(ty, cleared)
    assert np.array_equal(total, (x + y).astype(np.float64))
    assert not zeros.any()
