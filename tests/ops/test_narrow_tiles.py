"""Products whose last tile is narrow have the bits that they have in a whole one."""

from dataclasses import replace

import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, Bench

from qlora_wgpu.kernels.gemm import GEMM, Gemm, LoraTerm

ROWS, RANK = 37, 5
WHOLE = 256  # columns, of whole tiles whatever a subgroup's size


def product(device, dtype, columns, *, with_rows, float32, residual, rows=16, depth=72):
    """The first columns of one product."""
    rng = np.random.default_rng(3)
    x, w, skip = (
        rng.standard_normal((n, m)) for n, m in ((ROWS, depth), (depth, WHOLE), (ROWS, WHOLE))
    )
    u, factor = rng.standard_normal((ROWS, RANK)), rng.standard_normal((RANK, WHOLE))
    w, factor, skip = w[:, :columns], factor[:, :columns], skip[:, :columns]
    if with_rows:
        w, factor = w.T, factor.T
    cut = {"texture_nn_rows": rows, "texture_nt_rows": rows}
    bench = Bench(device, dtype, replace(PROFILES["texture"], **cut))
    g = bench.graph
    y = (g.float32 if float32 else g.operand)("y", ROWS, columns)
    term = LoraTerm(bench.given(u), bench.given(factor), 0)
    added = bench.given(skip) if residual else None
    GEMM.launch(
        g, Gemm(bench.operand(x), bench.operand(w), y, with_rows, lora=term, residual=added)
    )
    (launch,) = [each for each in g.launches if "gemm" in each.kernel]
    return bench.run(y)[0], "fn half_at" in launch.shader.code


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_rows", [True, False])
@pytest.mark.parametrize(("float32", "residual"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("columns", [140, 136])
def test_narrow_tiles_change_no_bit(device, dtype, columns, with_rows, float32, residual):
    options = {"with_rows": with_rows, "float32": float32, "residual": residual}
    got, narrow = product(device, dtype, columns, **options)
    whole, other = product(device, dtype, WHOLE, **options)
    assert (narrow, other) == (True, False)
    np.testing.assert_array_equal(got, whole[:, :columns])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_rows", [True, False])
@pytest.mark.parametrize("columns", [140, WHOLE])
@pytest.mark.parametrize("depth", [72, 75])
def test_rows_of_a_tile_change_no_bit(device, dtype, columns, with_rows, depth):
    """37 rows fill neither four tiles of ten nor two of 32; 75 are no whole eights of terms."""
    options = {"with_rows": with_rows, "float32": True, "residual": True, "depth": depth}
    got, *others = (
        product(device, dtype, columns, rows=rows, **options)[0] for rows in (10, 8, 16, 32)
    )
    for other in others:
        np.testing.assert_array_equal(got, other)
