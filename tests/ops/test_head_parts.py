import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.ops.columns import HeadPart, head_parts
from qlora_wgpu.reference import attention as reference
from qlora_wgpu.reference.tape import grads

ROWS, HEADS, HEAD_DIM = 23, 3, 18
OWN, COMMON = (HEADS * 14, 14, 3, 9), (29, 0, 22, 7)
"""Columns, a head's columns, the first taken, how many."""


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("sources", [(OWN,), (OWN, COMMON), (COMMON, OWN), (COMMON,)])
def test_heads_of_parts(device, profile, dtype, kind, sources):
    rng = np.random.default_rng(3)
    bench = Bench(device, dtype, PROFILES[profile])
    arrays = [rng.standard_normal((ROWS, columns)) for columns, *_ in sources]
    xs = [bench.operand(array, grad=True) for array in arrays]
    parts = [HeadPart(x, *rest) for x, (_, *rest) in zip(xs, sources, strict=True)]
    dy = rng.standard_normal((ROWS, HEADS * HEAD_DIM))
    y = head_parts(bench.graph, parts, HEADS, HEAD_DIM)
    got_y, *got = bench.run(y, *bench.gradients(y, bench.given(dy, kind), *xs))
    held = [(rounded(a, dtype), *rest) for a, (_, *rest) in zip(arrays, sources, strict=True)]
    assert_close(got_y, reference.head_parts(held, HEADS, HEAD_DIM), 0.0, "copied")

    def made(*xs):
        own = [(x, *rest) for x, (_, *rest) in zip(xs, sources, strict=True)]
        return reference.head_parts(own, HEADS, HEAD_DIM)

    gradients = grads(made, rounded(dy, kind), *(a for a, *_ in held), of=len(held))
    for dx, expected in zip(got, gradients, strict=True):
        assert_close(dx, expected, tolerance("float32", HEADS), "sums over heads")


def test_two_parts_of_one_matrix(device):
    """As latent attention's queries are put together: both gradients add up."""
    rng = np.random.default_rng(4)
    bench = Bench(device, "float32", PROFILES["cpu"])
    array, dy = rng.standard_normal((ROWS, HEADS * 14)), rng.standard_normal((ROWS, HEADS * 14))
    x = bench.operand(array, grad=True)
    y = head_parts(bench.graph, [HeadPart(x, 14, 5, 9), HeadPart(x, 14, 0, 5)], HEADS, 14)
    got_y, got = bench.run(y, *bench.gradients(y, bench.given(dy), x))
    exact, back = (rounded(a, "float32").reshape(ROWS, HEADS, 14) for a in (array, dy))
    assert_close(got_y, np.roll(exact, -5, 2).reshape(ROWS, -1), 0.0, "copied")
    assert_close(got, np.roll(back, 5, 2).reshape(ROWS, -1), 0.0, "copied")
