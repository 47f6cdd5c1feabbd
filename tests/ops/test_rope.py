import numpy as np
import pytest
from support.harness import (
    DTYPES,
    PROFILES,
    VARIANTS,
    Bench,
    assert_close,
    assert_formula,
    rounded,
    tolerance,
)

from qlora_wgpu.graph.graph import GraphError
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.reference import attention as reference
from qlora_wgpu.reference.tape import grad
from qlora_wgpu.selfcheck.cases.common import normal


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"),
    [(1, 6, 6), (3, 10, 10), (2, 64, 64), (3, 20, 8), (3, 40, 16), (2, 24, 8)],
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dy_dtype", DTYPES)
def test_rope(device, profile, dtype, heads, head_dim, rotary_dim, interleaved, dy_dtype):
    sizes, exact = (head_dim, rotary_dim), dy_dtype == "float32"
    options = {"interleaved": interleaved}
    check(device, profile, dtype, 7, heads * head_dim, np.arange(7), sizes, exact, **options)


def check(device, profile, dtype, length, columns, rows, sizes, exact, told=None, **options):
    """Each row of x by a row of a table of this length."""
    table = normal("table", length, sizes[1] // 2, 2).astype(np.float32)
    bench = Bench(device, dtype, PROFILES[profile])
    constant, batch = bench.graph.constant("table", table), bench.batch_of(1, len(rows))
    if told is not None:
        options["rows"] = bench.given(told, "uint32")

    def op(g, x):
        return rope(g, [x], constant, batch, *sizes, **options)

    def formula(x):
        own = {name: value for name, value in options.items() if name != "rows"}
        return reference.rope(x, rows, table.astype(float), *sizes, **own)

    assert_formula(bench, op, formula, [normal("x", len(rows), columns)], exact=exact)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_rows_of_ones_own(device, profile, dtype):
    """Each row of x by the row of the table that it is told, forward and back."""
    rows = np.array([8, 0, 3, 3, 7, 1, 2])
    check(device, profile, dtype, 9, 64, rows, (64, 32), True, told=rows)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(10, 8), (64, 64), (24, 16)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("led_to", ["both", "queries", "keys"])
def test_queries_and_keys(device, profile, dtype, head_dim, rotary_dim, interleaved, led_to):
    """Both at once, on GPUs in one launch, and back the gradients of those that lead to a loss."""
    rng = np.random.default_rng(4)
    rows = 7
    shapes = [(rows, 5 * head_dim), (rows, 2 * head_dim)]
    xs, dys = ([rng.standard_normal(shape) for shape in shapes] for _ in range(2))
    table = rng.standard_normal((rows, rotary_dim // 2, 2)).astype(np.float32)
    bench = Bench(device, dtype, PROFILES[profile])
    txs = [bench.operand(x, grad=True) for x in xs]
    g = bench.graph
    ys = rope(
        g, txs, g.constant("table", table), bench.batch_of(1, rows), head_dim, rotary_dim,
        interleaved=interleaved,
    )  # fmt: skip
    led = {"both": (0, 1), "queries": (0,), "keys": (1,)}[led_to]
    types = ("float32", "bfloat16")
    for i in led:
        g.add_gradient(ys[i], bench.given(dys[i], types[i]))
    g.backward()
    launches = [launch.label for launch in g.launches].count("rope/rotate")
    assert launches == (2 if profile == "gpu" else 2 + len(led))
    got = bench.run(*ys, *(g.gradient_of(txs[i]) for i in led))
    exact = (np.arange(rows), table.astype(float), head_dim, rotary_dim)
    for x, y in zip(xs, got[:2], strict=True):
        expected = reference.rope(rounded(x, dtype), *exact, interleaved=interleaved)
        assert_close(y, expected, tolerance(dtype), "one rounding")
    for i, dx in zip(led, got[2:], strict=True):
        expected = grad(
            reference.rope, rounded(dys[i], types[i]), xs[i], *exact, interleaved=interleaved
        )
        assert_close(dx, expected, tolerance(dtype), "one rounding")


def test_three_are_refused(device):
    bench = Bench(device, "float32", PROFILES["gpu"])
    x = bench.operand(np.ones((1, 8)))
    table = bench.graph.constant("table", np.ones((1, 4, 2), np.float32))
    with pytest.raises(GraphError, match="one or two tensors, got 3"):
        rope(bench.graph, [x, x, x], table, bench.batch_of(1, 1), 8, 8)
