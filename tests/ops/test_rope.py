import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.ops.rope import rope
from qlora_wgpu.reference import rope as reference


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"),
    [(1, 6, 6), (3, 10, 10), (2, 64, 64), (3, 20, 8), (3, 40, 16), (2, 24, 8)],
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dy_dtype", DTYPES)
def test_rope(device, profile, dtype, heads, head_dim, rotary_dim, interleaved, dy_dtype):
    rng = np.random.default_rng(2)
    rows, columns = 7, heads * head_dim
    x, dy = rng.standard_normal((rows, columns)), rng.standard_normal((rows, columns))
    table = rng.standard_normal((rows, rotary_dim // 2, 2)).astype(np.float32)
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.operand(x, grad=True)
    constant = bench.graph.constant("table", table)
    y = rope(
        bench.graph, tx, constant, bench.batch_of(1, rows), head_dim, rotary_dim,
        interleaved=interleaved,
    )  # fmt: skip
    (dx,) = bench.gradients(y, bench.given(dy, dy_dtype), tx)
    got_y, got_dx = bench.run(y, dx)
    x, dy, positions = rounded(x, dtype), rounded(dy, dy_dtype), np.arange(rows)
    exact = (positions, table.astype(float), head_dim, rotary_dim)
    expected = reference.forward(x, *exact, interleaved=interleaved)
    assert_close(got_y, expected, tolerance(dtype), "one rounding")
    expected = reference.backward(dy, *exact, interleaved=interleaved)
    assert_close(got_dx, expected, tolerance(dtype), "one rounding")


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_rows_of_ones_own(device, profile, dtype):
    """Each row of x by the row of the table that it is told, forward and back."""
    rng = np.random.default_rng(3)
    x, dy = rng.standard_normal((7, 64)), rng.standard_normal((7, 64))
    table = rng.standard_normal((9, 16, 2)).astype(np.float32)
    rows = np.array([8, 0, 3, 3, 7, 1, 2])
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.operand(x, grad=True)
    y = rope(
        bench.graph, tx, bench.graph.constant("table", table), bench.batch_of(1, 7), 64, 32,
        rows=bench.given(rows, "uint32"),
    )  # fmt: skip
    (dx,) = bench.gradients(y, bench.given(dy, "float32"), tx)
    exact = (rows, table.astype(float), 64, 32)
    for got, of, function in zip(
        bench.run(y, dx), (rounded(x, dtype), rounded(dy, "float32")),
        (reference.forward, reference.backward), strict=True,
    ):  # fmt: skip
        assert_close(got, function(of, *exact), tolerance(dtype), "one rounding")
