import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench, assert_close, rounded, tolerance

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.families.family import ExpertSpec
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.weight_placement import WeightPlacement
from qlora_wgpu.model.weights import WeightLayout
from qlora_wgpu.ops.routing import combine, most_rows, permute, route
from qlora_wgpu.quant import quantize_nf4
from qlora_wgpu.reference import experts as reference
from qlora_wgpu.reference.tape import grad
from qlora_wgpu.selfcheck.cases.common import normal
from qlora_wgpu.selfcheck.cases.experts import Experts, compare_experts, dense_experts


@pytest.mark.quick(profile=["cpu", "gpu"])
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "inner", "outer", "r", "pieces"),
    [(70, 3, 2, 20, 44, 5, 1), (9, 7, 3, 36, 20, 12, 3), (40, 1, 1, 16, 24, 3, 1)],
)
def test_a_mixture(
    device, profile, dtype, normalized, rows, experts, top_k, inner, outer, r, pieces
):
    bench, logits = Bench(device, dtype, PROFILES[profile]), normal("logits", rows, experts)
    if experts > 3:
        logits[:, 1] = -9  # an expert that nobody meets
    cuts = range(0, experts, -(-experts // pieces))
    weights = {"up_proj": dense_experts(bench, normal("w", experts, outer, inner), cuts)}
    inputs = normal("x", rows, inner), logits, normal("skip", rows, outer)
    compare_experts(bench, Experts.of(bench, weights, r, 1), inputs, top_k, normalized)
    assert bench.excess <= 1.0, bench.worst


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
    elogits = grad(reference.weights_of, dweights, logits, ids, normalized=normalized)
    total = weights.sum(1)[:, None]
    near = tolerance(dtype, columns)
    assert_close(got[0], total * x + skip, tolerance("float32", top_k), "one sum")
    assert_close(got[1], total * dy + top_k * dp[0], near, "one rounding of each")
    assert_close(got[2], elogits, near, "sums over columns", terms=np.abs(dweights).max())
    assert_close(got[3], dy, 0.0, "handed on")


@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
@pytest.mark.parametrize("pieces", [1, 3])
def test_two_layers_of_the_same_rows(device, profile, dtype, pieces):
    """As gate and up have it: the second one's gradient adds to the first one's, tile by tile."""
    bench, cuts = Bench(device, dtype, PROFILES[profile]), range(0, 5, -(-5 // pieces))
    names = ("gate_proj", "up_proj")
    weights = {name: dense_experts(bench, normal(name, 5, 28, 20), cuts) for name in names}
    inputs = normal("x", 50, 20), normal("logits", 50, 5), normal("skip", 50, 28)
    compare_experts(bench, Experts.of(bench, weights, 0, 1), inputs, 2, True)
    assert bench.excess <= 1.0, bench.worst


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

    class Weight:
        is_quantized = is_mapped = must_requantize = False
        format = None

        def __init__(self, name):
            self.name, self.expert = name, int(name.split(".")[2])
            self.shape = shape

        def quantized(self):
            return None

        def read(self):
            return w[self.expert]

    class Folder:
        path = "folder"
        is_quantized = False

        def __contains__(self, name):
            return True

        def __getitem__(self, name):
            return Weight(name)

        find = __getitem__

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
