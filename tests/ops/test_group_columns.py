import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded

from qlora_wgpu.ops.columns import group_columns
from qlora_wgpu.reference import attention as reference
from qlora_wgpu.reference.tape import grad

# Queries, keys and values of each of three heads, then what gates them; and two halves of each.
PARTS = [(3, 15, 0, (5, 5, 3)), (3, 15, 13, (2,))]
HALVES = [(5, 9, 0, (4,)), (5, 9, 4, (5,))]


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("parts", [PARTS, HALVES, PARTS[1:], [(3, 15, 1, (2, 6, 5))]])
def test_parts_of_groups(device, profile, dtype, kind, parts):
    """Copies, and the sum of their gradients: zero where nothing was taken."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((37, 45))
    bench = Bench(device, dtype, PROFILES[profile])
    tx = bench.operand(x, grad=True)
    outputs = [group_columns(bench.graph, tx, *part) for part in parts]
    exact = np.zeros_like(x)
    for y, part in zip(outputs, parts, strict=True):
        dy = rng.standard_normal((37, y.columns))
        bench.graph.add_gradient(y, bench.given(dy, kind))
        exact += grad(reference.group_columns, rounded(dy, kind), x, *part)
    bench.graph.backward()
    *got, got_dx = bench.run(*outputs, bench.graph.gradient_of(tx))
    for y, part in zip(got, parts, strict=True):
        assert_close(y, reference.group_columns(rounded(x, dtype), *part), 0.0, "copied")
    assert_close(got_dx, exact, 0.0, "copied")
    writers = [launch.path for launch in bench.graph.launches if "backward" in launch.path]
    assert len(writers) == len(parts), "added in place"


@pytest.mark.parametrize("profile", PROFILES)
def test_float32_beside_operands(device, profile):
    """What is small keeps all its digits."""
    x = np.random.default_rng(6).standard_normal((9, 44))
    bench = Bench(device, "bfloat16", PROFILES[profile])
    tx = bench.given(x, grad=True)
    y = group_columns(bench.graph, tx, 11, 4, 2, (2,), float32=True)
    dy = bench.given(np.ones((9, 22)))
    got, dx = bench.run(y, *bench.gradients(y, dy, tx))
    assert y.dtype == "float32"
    assert_close(got, reference.group_columns(rounded(x, "float32"), 11, 4, 2, (2,)), 0.0, "copied")
    assert_close(
        dx,
        grad(reference.group_columns, 1.0, x, 11, 4, 2, (2,)),
        0.0,
        "copied",
    )


def test_the_order_of_the_parts():
    """As a view of (heads, parts) would be split and put together again."""
    x = np.arange(2 * 12.0).reshape(2, 12)
    heads = x.reshape(2, 3, 4)
    expected = np.concatenate([heads[:, :, :1].reshape(2, -1), heads[:, :, 1:3].reshape(2, -1)], 1)
    np.testing.assert_array_equal(reference.group_columns(x, 3, 4, 0, (1, 2)), expected)
