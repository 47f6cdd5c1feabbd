import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.families.family import ExpertSpec
from qlora_wgpu.graph.tensor import matrix
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.weight_placement import WeightPlacement
from qlora_wgpu.model.weights import WeightLayout
from qlora_wgpu.ops.experts import expert_linear, with_factors
from qlora_wgpu.ops.modules import DenseExperts, ExpertLinear
from qlora_wgpu.ops.routing import combine, most_rows, permute, route
from qlora_wgpu.quant import quantize_nf4
from qlora_wgpu.reference import experts as reference
from qlora_wgpu.reference.tape import grad, grads


def lora_of(bench, adapter, stack, values):
    """The stack's adapter with those values in its flat vector, and the gradient's tensor."""
    adapter.parameters.whole.storage.data = values
    zeros = np.zeros(adapter.length, np.float32)
    adapter.gradient.whole.storage.data = zeros
    return adapter.expert_loras[stack.name]


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "inner", "outer", "r", "pieces"),
    [(70, 3, 2, 20, 44, 5, 1), (9, 7, 3, 36, 20, 12, 3), (40, 1, 1, 16, 24, 3, 1)],
)
def test_a_mixture(
    device, profile, dtype, normalized, rows, experts, top_k, inner, outer, r, pieces
):
    rng = np.random.default_rng(3)
    x, dy = rng.standard_normal((rows, inner)), rng.standard_normal((rows, outer))
    w = rng.standard_normal((experts, outer, inner))
    logits = rng.standard_normal((rows, experts))
    skip = rng.standard_normal((rows, outer))
    if experts > 3:
        logits[:, 1] = -9  # an expert that nobody meets
    bench = Bench(device, dtype, PROFILES[profile])
    g = bench.graph
    stack = ExpertSpec("mlp.experts", "up_proj", experts, outer, inner)
    adapter = AdapterLayout(LoraConfig(r=r, lora_alpha=r, target_modules=["up_proj"]), [], [stack])
    flat = adapter.initial(0)
    arrays = {n: rng.standard_normal(a.shape) for n, a in adapter.split(flat).items()}
    lora = lora_of(bench, adapter, stack, adapter.join(arrays))
    count = -(-experts // pieces)
    shards = [
        (i, len(w[i : i + count]), bench.operand(w[i : i + count].reshape(-1, inner)))
        for i in range(0, experts, count)
    ]
    layer = ExpertLinear("up", DenseExperts(experts, outer, inner, tuple(shards)), lora)
    tx, tlogits = bench.operand(x, grad=True), bench.given(logits, grad=True)
    tskip = bench.given(skip, grad=True)
    routing = route(g, tlogits, top_k, normalized=normalized)
    y = expert_linear(g, permute(g, tx, routing), layer, routing, bench.batch_of(1, rows))
    y = combine(g, y, routing, tskip)
    g.add_gradient(y, bench.given(dy))
    g.backward()
    dx, dlogits = g.gradient_of(tx), g.gradient_of(tlogits)
    whole = matrix("flat", 1, adapter.length, "float32", adapter.gradient.whole.storage)
    got_y, got_x, got_logits, got_flat = bench.run(y, dx, dlogits, whole)

    name = "base_model.model.mlp.experts.{}.up_proj.lora_{}.weight"
    a = np.stack([arrays[name.format(e, "A")] for e in range(experts)])
    b = np.stack([arrays[name.format(e, "B")] for e in range(experts)])
    a, b = rounded(a, "float32"), rounded(b, "float32")
    full = rounded(w, dtype) + b @ a
    x, logits, dy = rounded(x, dtype), rounded(logits, "float32"), rounded(dy, "float32")
    ids, weights = reference.route(logits, top_k, normalized=normalized)
    expected = reference.mix(x, ids, weights, full) + skip
    ex, eweights, ew = grads(reference.mix, dy, x, ids, weights, full, of=(0, 2, 3))
    elogits = grad(reference.softmax_weights, eweights, logits, ids, normalized=normalized)
    # Results pass through an operand on their way, and so do gradients.
    near = tolerance(dtype, max(inner, outer, rows))
    assert_close(got_y, expected, near, "sums over K")
    assert_close(got_x, ex, near, "sums over N")
    assert_close(got_logits, elogits, near, "sums over N", terms=np.abs(eweights).max())
    gradients = adapter.split(got_flat[0].astype(np.float32))
    for e in range(experts):
        da, db = b[e].T @ ew[e], ew[e] @ a[e].T
        scale = max(np.abs(ew[e]).max(), 1e-9) * 5 * max(inner, outer)
        assert_close(gradients[name.format(e, "A")], da, near, "sums over rows", terms=scale)
        assert_close(gradients[name.format(e, "B")], db, near, "sums over rows", terms=scale)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("normalized", [True, False])
def test_rows_go_and_come_back(device, profile, dtype, kind, normalized):
    """Permuted, weighted and added up, with gradients that arrive in either type."""
    rng = np.random.default_rng(8)
    rows, experts, top_k, columns = 41, 5, 2, 20
    x, skip, dy, dp = (rng.standard_normal((rows, columns)) for _ in range(4))
    logits = rng.standard_normal((rows, experts))
    bench = Bench(device, dtype, PROFILES[profile])
    g = bench.graph
    tx, tlogits = bench.operand(x, grad=True), bench.given(logits, grad=True)
    tskip = bench.given(skip, grad=True)
    routing = route(g, tlogits, top_k, normalized=normalized)
    moved = permute(g, tx, routing)
    y = combine(g, moved, routing, tskip)
    # Every slot gets it, of which only those that are taken come back.
    g.add_gradient(moved, bench.given(np.tile(dp[:1], (routing.rows, 1)), kind))
    g.add_gradient(y, bench.given(dy, kind))
    g.backward()
    got = bench.run(y, *(g.gradient_of(t) for t in (tx, tlogits, tskip)))

    x, dy, dp = rounded(x, dtype), rounded(dy, kind), rounded(dp, kind)
    logits, skip = rounded(logits, "float32"), rounded(skip, "float32")
    ids, weights = reference.route(logits, top_k, normalized=normalized)
    dweights = np.repeat((dy * x).sum(1)[:, None], top_k, axis=1)
    elogits = grad(reference.softmax_weights, dweights, logits, ids, normalized=normalized)
    total = weights.sum(1)[:, None]
    near = tolerance(dtype, columns)
    assert_close(got[0], total * x + skip, tolerance("float32", top_k), "one sum")
    assert_close(got[1], total * dy + top_k * dp[0], near, "one rounding of each")
    assert_close(got[2], elogits, near, "sums over columns", terms=np.abs(dweights).max())
    assert_close(got[3], dy, 0.0, "handed on")


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("kind", DTYPES)
def test_factors(device, profile, dtype, kind):
    """Weights times their experts' factors, of more rows than one tile of an expert has."""
    rng = np.random.default_rng(10)
    logits, dy, factors = (rng.standard_normal(s) for s in ((150, 5), (150, 3), 5))
    logits[:, 3] += 4
    bench = Bench(device, dtype, PROFILES[profile])
    tlogits = bench.given(logits, grad=True)
    routing = route(bench.graph, tlogits, 3, normalized=True)
    factored = with_factors(bench.graph, routing, bench.given(factors))
    (dlogits,) = bench.gradients(factored.weights, bench.given(dy, kind), tlogits)
    got, got_dx = bench.run(factored.weights, dlogits)
    logits, factors, dy = rounded(logits, "float32"), rounded(factors, "float32"), rounded(dy, kind)
    ids, weights = reference.route(logits, 3, normalized=True)
    near = tolerance("float32")
    assert_close(got, reference.with_factors(weights, ids, factors), near, "float32 arithmetic")
    dweights = reference.with_factors(dy, ids, factors)
    expected = grad(reference.softmax_weights, dweights, logits, ids, normalized=True)
    assert_close(got_dx, expected, near, "float32 arithmetic")


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("normalized", [True, False])
def test_weights_gradient_of_either_type(device, kind, normalized):
    rng = np.random.default_rng(9)
    logits, dweights = rng.standard_normal((23, 6)), rng.standard_normal((23, 3))
    bench = Bench(device, "float32", PROFILES["cpu"])
    tlogits = bench.given(logits, grad=True)
    routing = route(bench.graph, tlogits, 3, normalized=normalized)
    (got,) = bench.run(*bench.gradients(routing.weights, bench.given(dweights, kind), tlogits))
    logits = rounded(logits, "float32")
    ids, _ = reference.route(logits, 3, normalized=normalized)
    expected = grad(
        reference.softmax_weights, rounded(dweights, kind), logits, ids, normalized=normalized
    )
    assert_close(got, expected, tolerance("float32"), "float32 arithmetic")


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("pieces", [1, 3])
def test_two_layers_of_the_same_rows(device, profile, dtype, pieces):
    """As gate and up have it: the second one's gradient adds to the first one's, tile by tile."""
    rng = np.random.default_rng(10)
    rows, experts, top_k, inner, outer = 50, 5, 2, 20, 28
    x, dy = rng.standard_normal((rows, inner)), rng.standard_normal((2, rows, outer))
    w = rng.standard_normal((2, experts, outer, inner))
    logits = rng.standard_normal((rows, experts))
    bench = Bench(device, dtype, PROFILES[profile])
    g, batch = bench.graph, bench.batch_of(1, rows)
    tx, none = bench.operand(x, grad=True), bench.given(np.zeros((rows, outer)))
    routing = route(g, bench.given(logits), top_k, normalized=True)
    moved = permute(g, tx, routing)
    count = -(-experts // pieces)
    for stack, cotangent in zip(w, dy, strict=True):
        shards = tuple(
            (i, len(stack[i : i + count]), bench.operand(stack[i : i + count].reshape(-1, inner)))
            for i in range(0, experts, count)
        )
        layer = ExpertLinear("l", DenseExperts(experts, outer, inner, shards), None)
        y = combine(g, expert_linear(g, moved, layer, routing, batch), routing, none)
        g.add_gradient(y, bench.given(cotangent))
    g.backward()
    (got,) = bench.run(g.gradient_of(tx))
    ids, weights = reference.route(rounded(logits, "float32"), top_k, normalized=True)
    expected = np.zeros_like(x)
    for a, b in zip(w, dy, strict=True):
        a, b = rounded(a, dtype), rounded(b, "float32")
        expected += grads(reference.mix, b, rounded(x, dtype), ids, weights, a, of=(0, 2, 3))[0]
    assert_close(got, expected, tolerance(dtype, outer), "sums over N")


def test_every_division_has_room():
    rng = np.random.default_rng(0)
    for _ in range(300):
        experts, rows, top_k = rng.integers(1, 9), rng.integers(1, 200), rng.integers(1, 4)
        top_k = min(top_k, experts)
        ids = np.argsort(rng.random((rows, experts)) * rng.random(experts) ** 4, axis=1)[:, :top_k]
        counts = np.bincount(ids.reshape(-1), minlength=experts)
        assert (-(-counts // 64) * 64).sum() <= most_rows(rows * top_k, experts)


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("shape", [(44, 20), (20, 96)])
def test_quantized_experts(device, monkeypatch, profile, dtype, double_quant, shape):
    experts, rng = 5, np.random.default_rng(4)
    w = rng.standard_normal((experts, *shape)).astype(np.float32)
    w *= np.arange(1, experts + 1)[:, None, None]  # so that scales and offsets differ

    class Folder:
        path = "folder"

        def has(self, name):
            return True

        is_quantized = False

        def must_requantize(self, name):
            return False

        def quantized(self, name, *, mapped):
            return None

        def is_mapped(self, name):
            return False

        def dequantized(self, name):
            return w[int(name.split(".")[2])]

    bench = Bench(device, dtype, PROFILES[profile])
    stack = ExpertSpec("mlp.experts", "up_proj", experts, *shape)
    quant = QuantConfig(double_quant=double_quant)
    layout = WeightLayout(
        quant, dtype, device.max_binding, Folder(), textures=bench.profile.textures
    )
    layout.placement = WeightPlacement(layout._reader, "", textures=False, first_streamed=1)
    layer = layout._experts(
        stack, AdapterLayout(LoraConfig(target_modules=["up_proj"]), [], [stack])
    )
    layout.placement.load(layout.table, device)
    monkeypatch.setattr("qlora_wgpu.ops.quantized._EXPERT_BYTES", 2 * w[0].nbytes)  # about two
    shards = list(layer.weight.expert_shards(bench.graph))
    assert len(shards) > 1 and sum(count for _, count, _ in shards) == experts
    got = np.concatenate(bench.run(*(w for _, _, w in shards)))
    exact = [quantize_nf4(each, 64, double_quant).dequantize() for each in w]
    bound = 2e-7 if dtype == "float32" else 2**-8
    assert_close(got, rounded(np.concatenate(exact), dtype), bound, "one fused rounding")
