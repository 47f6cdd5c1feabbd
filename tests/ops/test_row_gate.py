import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.ops.pointwise import row_gate
from qlora_wgpu.reference import pointwise as reference
from qlora_wgpu.reference.tape import grads


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("added", [True, False])
def test_row_gate(device, profile, dtype, kind, added):
    rng = np.random.default_rng(4)
    x, dy, skip = (rng.standard_normal((37, 45)) for _ in range(3))
    gate = 3 * rng.standard_normal((37, 1))
    gate[:2] = [[-95.0], [95.0]]  # where exp is far from one
    bench = Bench(device, dtype, PROFILES[profile])
    tx, tgate = bench.operand(x, grad=True), bench.given(gate, grad=True)
    tskip = bench.given(skip, grad=True)
    y = row_gate(bench.graph, tx, tgate, tskip if added else None)
    of = (tx, tgate, tskip) if added else (tx, tgate)
    got_y, got_dx, got_gate, *rest = bench.run(y, *bench.gradients(y, bench.given(dy, kind), *of))
    x, gate, dy = rounded(x, dtype), rounded(gate, "float32"), rounded(dy, kind)
    dx, dgate = grads(reference.row_gate, dy, x, gate, of=2)
    expected = reference.row_gate(x, gate) + added * rounded(skip, "float32")
    assert_close(got_y, expected, tolerance("float32"), "exp is good to 1e-6")
    assert_close(got_dx, dx, tolerance(dtype), "one rounding")
    assert_close(got_gate, dgate, tolerance("float32", 45), "sums over columns")
    for got in rest:
        assert_close(got, dy, 0.0, "handed on")
