import numpy as np
import pytest
from support.harness import PROFILES, Bench, assert_close, rounded, tolerance

from qlora_wgpu.ops.routing import Scoring, route, route_by_scores
from qlora_wgpu.reference import experts as reference
from qlora_wgpu.reference.tape import grad

ROWS, EXPERTS, TOP_K = 41, 12, 3


def inputs():
    rng = np.random.default_rng(6)
    logits = 2 * rng.standard_normal((ROWS, EXPERTS))
    logits[3] = 0.25  # all alike: the first ones are chosen
    return logits, 0.3 * rng.standard_normal(EXPERTS), rng.standard_normal((ROWS, TOP_K))


def test_a_sum_at_its_least_does_not_grow(device):
    """The weights of ERNIE's rule in rows whose chosen experts' shares are below the least."""
    logits, bias, _ = inputs()
    rule = reference.Rule(False, True, least=0.6, at_least=True)
    scores = reference.scores_of(logits, sigmoids=False)
    ids = reference.route_by_scores(logits, bias, TOP_K, rule)[0]
    below = np.take_along_axis(scores, ids, 1).sum(1) < 0.6
    assert 5 < below.sum() < ROWS - 5


@pytest.mark.quick("values")
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("scale", [0.0, 0.22])
def test_weights_of_logits_are_scaled(device, normalized, scale):
    logits, _, dweights = inputs()
    bench = Bench(device, "float32", PROFILES["cpu"])
    tlogits = bench.given(logits, grad=True)
    routing = route(bench.graph, tlogits, TOP_K, normalized=normalized, scale=scale)
    gradients = bench.gradients(routing.weights, bench.given(dweights), tlogits)
    got_weights, got = bench.run(routing.weights, *gradients)
    logits, dweights = rounded(logits, "float32"), rounded(dweights, "float32")
    ids, weights = reference.route(logits, TOP_K, normalized=normalized)
    assert_close(got_weights, scale * weights, tolerance("float32"), "float32 arithmetic")
    expected = grad(reference.softmax_weights, scale * dweights, logits, ids, normalized=normalized)
    assert_close(got, expected, tolerance("float32"), "float32 arithmetic")


@pytest.mark.parametrize("profile", PROFILES)
def test_experts_that_tie_in_a_closed_group(device, profile):
    """A closed group's experts are not chosen, however low those of open ones are."""
    scoring = Scoring(True, True, pairs=True, groups=2, top_groups=1)
    logits = np.array([[5.0, -9.0, -9.5, 1.0, 1.0, 1.0]])
    bias = np.array([0.0, -3.0, -4.0, -5.0, -5.0, -5.0])
    bench = Bench(device, "float32", PROFILES[profile])
    routing = route_by_scores(bench.graph, bench.given(logits), bench.given(bias), 3, scoring)
    (slots,) = bench.run(routing.slots)
    assert list(slots.ravel()) == [0, 64, 128]
