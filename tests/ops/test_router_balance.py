import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, Bench, assert_close, rounded, tolerance

from qlora_wgpu.graph.graph import GraphError
from qlora_wgpu.ops.linear import linear
from qlora_wgpu.ops.modules import DenseMatrix, Linear
from qlora_wgpu.ops.routing import balance_loss, balance_sums, largest, route
from qlora_wgpu.reference import experts as reference
from qlora_wgpu.reference.tape import grad

ROWS, EXPERTS, TOP_K, LABELS, COEFFICIENT = 42, 11, 3, 5, 0.3


def segments():
    """Two rows of 21 tokens: two samples and padding, and padding after one."""
    made = np.ones((2, 21), int)
    made[0, 9:], made[0, 17:], made[1, 6:] = 10, 0, 0
    return made


def batch_of(bench, weights=None):
    targets = np.full((2, 21), -100)
    targets[0, :LABELS] = 7
    return bench.batch_of(2, 21, segments=segments(), targets=targets, weights=weights)


def layers(count=2):
    return 2 * np.random.default_rng(3).standard_normal((count, ROWS, EXPERTS))


MASK = (segments() > 0).astype(float).ravel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("again", [False, True])
def test_beside_a_choice_and_behind_a_router(device, profile, dtype, again):
    """Logits of a product are chosen by and balanced, in layers that are computed again or not."""
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal((ROWS, 16)), rng.standard_normal((EXPERTS, 16)) / 2
    bench = Bench(device, dtype, PROFILES[profile])
    g, batch = bench.graph, batch_of(bench)
    router = Linear("r", DenseMatrix(EXPERTS, 16, ((0, bench.operand(w)),)), None, None)
    tx, dweights = bench.operand(x, grad=True), rng.standard_normal((ROWS, TOP_K))

    def layer(xs):
        logits = linear(g, xs[0], router, batch, float32=True)
        routing = route(g, logits, TOP_K, normalized=True)
        before = xs[1] if len(xs) > 1 else None
        return [balance_sums(g, logits, routing.ids, batch, before), routing.weights]

    sums, _ = layer([tx])
    sums, weights = g.checkpoint(layer, [tx, sums]) if again else layer([tx, sums])
    balance_loss(g, sums, TOP_K, batch, bench.given(np.zeros((1, 6))), COEFFICIENT)
    g.add_gradient(weights, bench.given(dweights))
    g.backward()
    (got,) = bench.run(g.gradient_of(tx))
    x, w, dweights = rounded(x, dtype), rounded(w, dtype), rounded(dweights, "float32")
    logits = x @ w.T
    ids, _ = reference.route(logits, TOP_K, normalized=True)
    dlogits = grad(reference.weights_of, dweights, logits, ids, normalized=True)
    dlogits += (
        LABELS * COEFFICIENT * sum(grad(reference.balance_loss, 1.0, [logits] * 2, TOP_K, MASK))
    )
    # Gradients of bfloat16 operands are rounded between the products that add up.
    bound = tolerance(dtype, EXPERTS) * (3 if dtype == "bfloat16" else 1)
    assert_close(got, dlogits @ w, bound, "rounded operands")


def test_nothing_but_padding(device):
    bench = Bench(device, "float32", PROFILES["cpu"])
    g, batch = bench.graph, bench.batch_of(2, 21, segments=np.zeros((2, 21)))
    logits = bench.given(layers()[0], grad=True)
    sums = balance_sums(g, logits, largest(g, logits, TOP_K), batch)
    stats = bench.given(np.zeros((1, 6)))
    balance_loss(g, sums, TOP_K, batch, stats, COEFFICIENT)
    g.backward()
    for array in bench.run(sums, stats, g.gradient_of(logits)):
        assert not array.any()


def test_sums_of_other_experts_are_refused(device):
    bench = Bench(device, "float32", PROFILES["cpu"])
    g, batch, logits = bench.graph, batch_of(bench), bench.given(layers()[0])
    ids = largest(g, logits, TOP_K)
    with pytest.raises(GraphError, match="does not fit 11 experts"):
        balance_sums(g, logits, ids, batch, bench.given(np.zeros((2, 7))))
    with pytest.raises(GraphError, match="do not fit 42 rows"):
        balance_sums(g, bench.given(layers()[0][:40]), ids, batch)


def test_the_largest_logit_is_any_expert_s(device):
    """Logits 200 above the first one's, whose exp would be beyond float32."""
    logits = layers()[0]
    logits[:, 4] += 200.0
    bench = Bench(device, "float32", PROFILES["cpu"])
    g, batch = bench.graph, batch_of(bench)
    given = bench.given(logits, grad=True)
    sums = balance_sums(g, given, largest(g, given, TOP_K), batch)
    balance_loss(g, sums, TOP_K, batch, bench.given(np.zeros((1, 6))), COEFFICIENT)
    g.backward()
    (got,) = bench.run(g.gradient_of(given))
    logits = rounded(logits, "float32")
    (expected,) = grad(reference.balance_loss, 1.0, [logits], TOP_K, MASK)
    bound = tolerance("float32", EXPERTS)
    assert_close(got, LABELS * COEFFICIENT * expected, bound, "float32 sums")
