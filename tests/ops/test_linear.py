import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded

from qlora_wgpu.gpu.kernel_config import gpu_profile
from qlora_wgpu.graph.tensor import Storage, row
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.ops import linear as linear_ops
from qlora_wgpu.ops.linear import linear
from qlora_wgpu.ops.modules import DenseMatrix, Linear
from qlora_wgpu.selfcheck import runner
from qlora_wgpu.selfcheck.cases.common import KEY, normal, whole_gradient
from qlora_wgpu.selfcheck.cases.linear import Layers, Sizes, adapted, compare_layers, dense

MODULE = 987654


@pytest.fixture(autouse=True)
def tight(monkeypatch):
    monkeypatch.setattr(runner, "SUMS", 4e-6)  # sums of float32 in any order


def check(device, profile, dtype, sizes, *, bias=False, output="operand", p=0.0, multiplier=1.0):
    bench = Bench(device, dtype, PROFILES[profile])
    layers = adapted(bench, sizes, "up_proj", has_bias=bias, dropout=p)
    batch = bench.batch_of(1, sizes.rows, dropout_key=KEY if p else None)
    compare_layers(bench, layers, [batch], output, multiplier=multiplier)
    assert bench.excess <= 1.0, bench.worst


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize(
    "sizes", [Sizes(1, 5, 12, 1, 12), Sizes(37, 72, 130, 5, 130), Sizes(19, 130, 20, 16, 20)]
)
def test_shapes(device, profile, dtype, sizes):
    check(device, profile, dtype, sizes)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_bias_residual_and_dropout(device, profile, dtype):
    check(device, profile, dtype, Sizes(21, 44, 83, 3, 83), bias=True, output="residual", p=0.3)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_shards_of_rows(device, profile, dtype):
    check(device, profile, dtype, Sizes(18, 36, 83, 4, 24), bias=True, p=0.2)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_multiplier(device, profile, dtype):
    sizes = Sizes(21, 44, 83, 3, 24)
    check(device, profile, dtype, sizes, output="residual", p=0.2, multiplier=0.3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("few_registers", [False, True])
def test_terms_of_several_turns(device, monkeypatch, dtype, few_registers):
    """A rank of three units, of which a turn takes two; more than a tile of rows and columns."""
    monkeypatch.setitem(PROFILES, "tried", gpu_profile(None, few_registers=few_registers))
    check(device, "tried", dtype, Sizes(70, 72, 130, 20, 130), output="residual")


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
    """The adapter's gradient is made all the same."""
    bench = Bench(device, "float32", PROFILES["cpu"])
    layers = Layers.of(bench, {"up_proj": dense(bench, normal("w", 20, 12))}, 4)
    (layer,) = layers.linears
    x, dy = normal("x", 9, 12), normal("dy", 9, 20)
    y = linear(bench.graph, bench.operand(x), layer, bench.batch_of(1, 9))
    bench.gradients(y, bench.given(dy))
    layout, (a, _) = layers.adapter[0], layers.adapter[1].values()
    (flat,) = bench.run(whole_gradient(layout))
    _, got = layout.split(flat[0].astype(np.float32)).values()
    x, dy = rounded(x, "float32"), rounded(dy, "float32")
    assert_close(got, 1.0 + dy.T @ (2.0 * x @ a.T), 4e-6, "float32 sums")


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


PLACE, OTHER = Storage("biases", "base", 4096), Storage("others", "base", 4096)


def bias_at(offset, storage=PLACE, columns=12):
    return row("bias", columns, "float32", storage, offset)


@pytest.mark.parametrize(
    ("biases", "fit"),
    [
        ([], True),
        ([None, None], True),
        ([bias_at(0), bias_at(256)], True),
        ([bias_at(256), bias_at(0)], False),
        ([bias_at(0), None], False),
        ([bias_at(0), bias_at(256, OTHER)], False),
        ([bias_at(0, None), bias_at(256, None)], False),
    ],
)
def test_biases_of_layers_that_are_computed_together_follow_each_other(biases, fit):
    assert linear_ops._biases_fit(biases) == fit


def test_adjacent_biases_are_one_tensor():
    assert linear_ops._joined_biases([None]) == (None, ())
    whole, begins = linear_ops._joined_biases([bias_at(256), bias_at(512), bias_at(1024)])
    assert begins == (64, 192)
    assert (whole.offset, whole.columns, whole.stride) == (256, 192 + 16, 192 + 16)
