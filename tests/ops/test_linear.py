import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.gpu.kernel_config import gpu_profile
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.ops.linear import linear
from qlora_wgpu.ops.modules import DenseMatrix, Linear
from qlora_wgpu.reference import linear as reference
from qlora_wgpu.reference.tape import grads

KEY, MODULE = 123456, 987654


def check(
    device,
    profile,
    dtype,
    rows,
    inner,
    outer,
    r,
    *,
    bias,
    residual,
    p,
    shard,
    grad=True,
    multiplier=1.0,
):
    rng = np.random.default_rng(6)
    x, dy = rng.standard_normal((rows, inner)), rng.standard_normal((rows, outer))
    w, a, b = (rng.standard_normal(s) for s in ((outer, inner), (r, inner), (outer, r)))
    added = rng.standard_normal(outer) if bias else np.zeros(outer)
    skip = rng.standard_normal((rows, outer)) if residual else np.zeros((rows, outer))
    before_a, before_b = rng.standard_normal(a.shape), rng.standard_normal(b.shape)
    bench = Bench(device, dtype, PROFILES[profile])
    pieces = [
        (i, bench.operand(w[i : i + (shard or outer)])) for i in range(0, outer, shard or outer)
    ]
    lora = Lora(
        r, 0.5, p, MODULE, bench.given(a), bench.given(b),
        bench.given(before_a), bench.given(before_b),
    )  # fmt: skip
    layer = Linear(
        "layer",
        DenseMatrix(outer, inner, tuple(pieces)),
        bench.given(added) if bias else None,
        lora,
    )
    batch = bench.batch_of(1, rows, dropout_key=KEY if p else None)
    tx = bench.operand(x, grad=grad)
    tskip = bench.given(skip) if residual else None
    y = linear(bench.graph, tx, layer, batch, tskip, multiplier=multiplier)
    inputs = [tx] if grad else []
    gradients = bench.gradients(y, bench.given(dy), *inputs)
    got_y, got_a, got_b, *got_x = bench.run(y, lora.grad_a, lora.grad_b, *gradients)

    mask = np.ones_like(x)
    if p:
        stride = -(-inner // 8) * 8
        mask = reference.dropout_mask(rows, stride, inner, p, KEY, MODULE)
    x, w, rounded_dy = rounded(x, dtype), rounded(w, dtype), rounded(dy, dtype)
    exact = [rounded(v, "float32") for v in (a, b)]
    w = multiplier * w
    exact[1] = multiplier * exact[1]  # the adapter's product is multiplied as well
    expected_y = reference.linear(x, w, *exact, 0.5, mask, rounded(added, "float32")) + skip
    dx, da, db = grads(reference.linear, rounded_dy, x, w, *exact, 0.5, mask, of=(0, 2, 3))
    y_type = "float32" if residual else dtype
    assert_close(got_y, expected_y, tolerance(y_type, inner), "sums over K")
    sums = tolerance("float32", max(rows, outer, inner))
    assert_close(got_a, before_a + da, sums, "sums over rows, added to what was there")
    assert_close(got_b, before_b + multiplier * db, sums, "sums over rows, added to what was there")
    if grad:
        # Shards' products add up in float32; one alone is rounded once.
        kind = gradients[0].dtype
        assert kind == ("float32" if shard else dtype)
        depth = max(rows, outer, inner)
        assert_close(got_x[0], dx, tolerance(kind, depth), "sums over N, shards added")


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize(
    ("rows", "inner", "outer", "r"), [(1, 5, 12, 1), (37, 72, 130, 5), (19, 130, 20, 16)]
)
def test_shapes(device, profile, dtype, rows, inner, outer, r):
    check(
        device, profile, dtype, rows, inner, outer, r, bias=False, residual=False, p=0, shard=None
    )


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_bias_residual_and_dropout(device, profile, dtype):
    check(device, profile, dtype, 21, 44, 83, 3, bias=True, residual=True, p=0.3, shard=None)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_shards_of_rows(device, profile, dtype):
    check(device, profile, dtype, 18, 36, 83, 4, bias=True, residual=False, p=0.2, shard=24)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_multiplier(device, profile, dtype):
    check(
        device, profile, dtype, 21, 44, 83, 3, bias=False, residual=True, p=0.2, shard=24,
        multiplier=0.3,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("few_registers", [False, True])
def test_terms_of_several_turns(device, monkeypatch, dtype, few_registers):
    """A rank of three units, of which a turn takes two; more than a tile of rows and columns."""
    monkeypatch.setitem(PROFILES, "tried", gpu_profile(None, few_registers=few_registers))
    check(device, "tried", dtype, 70, 72, 130, 20, bias=False, residual=True, p=0, shard=None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_registers_change_no_bit(device, dtype):
    """Sums are made in the same order, whichever factor an invocation holds."""
    rng = np.random.default_rng(5)
    x, dy = rng.standard_normal((70, 150)), rng.standard_normal((70, 138))
    w, a, b = (rng.standard_normal(shape) for shape in ((138, 150), (12, 150), (138, 12)))
    found, paths = [], []
    for few_registers in (False, True):
        bench = Bench(device, dtype, gpu_profile(None, few_registers=few_registers))
        lora = Lora(12, 0.5, 0.0, MODULE, *map(bench.given, (a, b, 0 * a, 0 * b)))
        weight = DenseMatrix(138, 150, ((0, bench.operand(w)),))
        tx = bench.operand(x, grad=True)
        y = linear(bench.graph, tx, Linear("layer", weight, None, lora), bench.batch_of(1, 70))
        found.append(bench.run(y, *bench.gradients(y, bench.given(dy), tx)))
        paths.append({launch.shader.label for launch in bench.graph.launches})
    assert paths[0] != paths[1]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_first_layer_needs_no_dx(device):
    check(
        device, "cpu", "float32", 9, 12, 20, 4, bias=False, residual=False, p=0, shard=None,
        grad=False,
    )  # fmt: skip


def test_an_input_used_twice_sums_its_gradient(device):
    rng = np.random.default_rng(7)
    x, w1, w2 = (rng.standard_normal(s) for s in ((9, 12), (20, 12), (28, 12)))
    dy1, dy2 = rng.standard_normal((9, 20)), rng.standard_normal((9, 28))
    bench = Bench(device, "float32", PROFILES["cpu"])
    tx, batch = bench.operand(x, grad=True), bench.batch_of(1, 9)
    outputs = []
    for w, dy in ((w1, dy1), (w2, dy2)):
        matrix = DenseMatrix(*w.shape, ((0, bench.operand(w)),))
        y = linear(bench.graph, tx, Linear("l", matrix, None, None), batch)
        outputs.append((y, dy))
    for y, dy in outputs:
        bench.graph.add_gradient(y, bench.given(dy))
    bench.graph.backward()
    (got,) = bench.run(bench.graph.gradient_of(tx))
    # The second product adds to what the first has made.
    assert [launch.label for launch in bench.graph.launches].count("tensor/add") == 0
    exact = [rounded(v, "float32") for v in (dy1, w1, dy2, w2)]
    assert_close(got, exact[0] @ exact[1] + exact[2] @ exact[3], 4e-6, "float32 sums")
